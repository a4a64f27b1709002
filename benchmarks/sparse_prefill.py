"""Sparse prefill baselines and ours side by side: time, share of dense attention's weights kept, numbers found.

    python benchmarks/sparse_prefill.py times --output FILE [--length 32768 ...] [--text FILE]    # on a GPU
    python benchmarks/sparse_prefill.py retrieval --output FILE [--sequences 12]                 # anywhere

times: attention of the bundled model's 8 layers over its own queries and keys on a long text (far beyond the 4,096
tokens that it learned), index included; then, on random inputs, one layer of Llama-3.1-8B's shape and one of
DeepSeek-V2-Lite's, over the keys that its latents expand to, at the greatest length. The share kept is the sum of dense
attention's weights over the keys that are seen exactly, the mean over queries, heads and layers; computed is the share
of pairs of query and key that sparse prefill reads, in whole blocks. MInference's patterns are found before, on 30,000
tokens of the text. The file is written anew after every length.
retrieval: numbers hidden in 4,096 tokens; MInference's patterns are found on another such text, as in its paper.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import condense
from condense import (
    CCA,
    AShape,
    Dense,
    FlexPrefill,
    LMInfinite,
    Method,
    MInference,
    Recall,
    SnapKV,
    StreamingLLM,
    VerticalSlash,
)
from condense.analysis import patterns_by_layer, search_patterns
from condense.demo import demo_text
from condense.evaluate import passkey_sequences, retrieval
from condense.methods import SparsePrefill
from condense.models import MethodChoice
from condense.ops import seen_pairs
from condense.results import write_results
from condense.tasks import SequenceBuilder, encode_corpus, load_words, read_documents

LEARNED = CCA(window=256, summary="streaming", key_pooling="select", rep_bias="log_size")


def methods(length: int, patterns: dict[int, MInference] | None = None) -> dict[str, MethodChoice]:
    """What is compared; baselines with their papers' numbers, and vertical-slash with as many lines as fit 4,096."""
    short = length <= 4096
    return {
        "flex_prefill": FlexPrefill(),
        "vertical_slash": VerticalSlash(vertical=100, slash=400) if short else VerticalSlash(),
        **({"minference": patterns} if patterns else {}),
        "cca": LEARNED if short else LEARNED.replace(window=1024),
        "recall": Recall(window=256, num_recall=16) if short else Recall(num_recall=64),
        "streaming_llm": StreamingLLM(sink=4, window=492) if short else StreamingLLM(),
        "lm_infinite": LMInfinite(n_global=10, window=486) if short else LMInfinite(),
    }


def is_sparse(choice: MethodChoice) -> bool:
    return isinstance(choice[0] if isinstance(choice, dict) else choice, SparsePrefill)


def exact_part(method: Method) -> Method:
    """The method that sees what this one sees exactly, and nothing else."""
    if isinstance(method, CCA):
        return StreamingLLM(sink=0, window=method.window)
    return method.replace(unchosen="drop") if isinstance(method, Recall) else method


@torch.no_grad()
def layers_of(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rotated queries, keys and values of every layer of a stock model that reads ids ``[1, L]``."""
    found, stock = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def notes(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **settings: Any) -> Any:
        found.append((q.clone(), k.clone(), v.clone()))
        return stock(module, q, k, v, *args, **settings)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = notes
    try:
        model(ids, use_cache=False, logits_to_keep=1)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = stock
    return found


def timed(call: Any, repeats: int) -> float:
    """Milliseconds, the median; once unmeasured before."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


Layer = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def computed(layers: list[Layer], choice: MethodChoice) -> float:
    """The share of dense attention's pairs of query and key that a sparse prefill reads, in whole blocks."""
    length = layers[0][0].shape[2]
    pairs = []
    for i, (q, k, _) in enumerate(layers):
        method = choice[i] if isinstance(choice, dict) else choice
        pairs.append(seen_pairs(method.choose(q, k, scale=q.shape[-1] ** -0.5), length).double().mean())
    return float(torch.stack(pairs).mean()) / (length * (length + 1) / 2)


@torch.no_grad()
def compare(layers: list[Layer], choices: dict[str, MethodChoice], *, with_share: bool) -> list[dict[str, Any]]:
    """Rows of every method on queries, keys and values of layers."""
    length, rows, repeats = layers[0][0].shape[2], [], 3
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        dense = sum(
            timed(
                lambda x=x: torch.nn.functional.scaled_dot_product_attention(
                    *x, is_causal=True, enable_gqa=x[0].shape[1] != x[1].shape[1]
                ),
                repeats,
            )
            for x in layers
        )
    rows.append({"method": "cudnn", "length": length, "ms": dense, "share": 1.0})
    print(rows[-1], flush=True)
    whole = []
    if with_share:
        whole = [condense.attention(*x, method=Dense(), return_lse=True, backend="triton")[1] for x in layers]
    for name, choice in choices.items():
        of_layers = [choice[i] if isinstance(choice, dict) else choice for i in range(len(layers))]
        row: dict[str, Any] = {"method": name, "settings": choice, "length": length}
        try:
            row["ms"] = sum(
                timed(lambda x=x, m=m: condense.attention(*x, method=m), repeats)
                for x, m in zip(layers, of_layers, strict=True)
            )
            row["speedup"] = dense / row["ms"]
            if is_sparse(choice):
                row["index_ms"] = sum(
                    timed(lambda x=x, m=m: m.choose(*x[:2], scale=x[0].shape[-1] ** -0.5), repeats)
                    for x, m in zip(layers, of_layers, strict=True)
                )
                row["computed"] = computed(layers, choice)
            if with_share:
                lses = [
                    condense.attention(*x, method=exact_part(m), return_lse=True)[1]
                    for x, m in zip(layers, of_layers, strict=True)
                ]
                shares = [(lse - all_).exp().mean() for lse, all_ in zip(lses, whole, strict=True)]
                row["share"] = float(torch.stack(shares).mean())
        except Exception as error:  # one method's failure leaves the others
            row["error"] = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        rows.append(row)
        print({key: value for key, value in row.items() if key != "settings"}, flush=True)
        torch.cuda.empty_cache()
    return rows


def random_layer(heads: tuple[int, int, int], widths: tuple[int, int, int], length: int) -> list[Layer]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, n, length, width, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n, width in zip(heads, widths, strict=True)
    )
    return [(q, k, v)]


def times(options: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = condense.demo_model(torch.bfloat16)
    model = model.cuda()
    text = "\n".join(read_documents(options.text)) if options.text else demo_text().text
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids.cuda()
    ids = ids.repeat(1, -(-max(*options.length, 30_000) // ids.shape[1]))
    start = time.perf_counter()
    patterns = patterns_by_layer(search_patterns(model, ids[0, :30_000], AShape()))
    content: dict[str, Any] = {"bundled": [], "llama-3.1-8b": [], "deepseek-v2-lite": []}
    content |= {"search_seconds": time.perf_counter() - start, "patterns": patterns}
    print("search", content["search_seconds"], patterns, flush=True)

    def keep(shape: str, rows: list[dict[str, Any]]) -> None:
        content[shape] += rows
        write_results(options.output, content, overwrite=True)

    for length in options.length:
        layers = layers_of(model, ids[:, :length])
        keep("bundled", compare(layers, methods(length, patterns), with_share=True))
    del layers
    for length in options.length:
        choices = methods(length)
        keep("llama-3.1-8b", compare(random_layer((32, 8, 8), (128,) * 3, length), choices, with_share=False))
    length = max(options.length)
    sparse = {name: method for name, method in methods(length).items() if isinstance(method, SparsePrefill)}
    layer = random_layer((16, 16, 16), (192, 192, 128), length)
    keep("deepseek-v2-lite", compare(layer, sparse, with_share=False))
    return content


def found(options: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = condense.demo_model()
    model = model.cuda() if torch.cuda.is_available() else model
    documents = list(read_documents(options.text)) if options.text else [demo_text().text * 2]
    builder = SequenceBuilder(tokenizer, encode_corpus(documents, tokenizer), load_words().held_out, 4096)
    sequences = passkey_sequences(builder, options.sequences, seed=11)
    sample = torch.as_tensor(passkey_sequences(builder, 1, seed=12)[0].input_ids)
    patterns = patterns_by_layer(search_patterns(model, sample, AShape(sink=256, window=1536)))
    results = retrieval(model, {"dense": Dense(), **methods(4096, patterns)}, sequences)
    # SnapKV evicts after the prompt, so its answers are generated: in one forward over all it would be dense
    evicted = retrieval(model, {"snapkv": SnapKV(budget=512)}, sequences[: options.generated], decoding="generate")
    for result in (*results, *evicted):
        print(result.name, result.exact, flush=True)
    layers = layers_of(model, sample[None].to(model.device))
    read = {name: computed(layers, choice) for name, choice in methods(4096, patterns).items() if is_sparse(choice)}
    return {"length": 4096, "keys": 8, "results": [*results, *evicted], "computed": read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("times", "retrieval"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--length", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--text", nargs="+")
    parser.add_argument("--sequences", type=int, default=12)
    parser.add_argument("--generated", type=int, default=4)
    options = parser.parse_args()
    content = times(options) if options.what == "times" else found(options)
    write_results(options.output, content, overwrite=True)


if __name__ == "__main__":
    main()
