"""Hashes of all that condensed attention computes on a CPU, to prove that a change moves code and nothing else.

    python benchmarks/digest.py run before.json             # a few minutes; --small: less of everything
    python benchmarks/digest.py compare before.json after.json

Outputs, log-sum-exps, gradients, cached buffers and bytes, generated tokens: of whole sequences, packed documents,
growing and static caches (two chunks of a prompt, then steps), pages, models. ``--interpret``, with TRITON_INTERPRET=1
in the environment: the steps of both caches by interpreted kernels, and few of them. A refusal counts as its message.

Shapes: B rows, H query heads, K KV heads, L tokens, D width.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

import condense
from condense.caches import CondensedCacheLayer, ReadRequest, cache_nbytes
from condense.methods import Method, check_trainable
from condense.models.layers import ensure_layers
from condense.ops import Extras, NewToken
from condense.ops.paged import NewTokens, PagedState, Pages, read_paged
from condense.plan import ForwardPlan
from condense.serving.plan import SLOTS, serving_plan

_RECALL = "recall:group_size=4,window=6,num_recall=3,min_recall=0"
METHODS = {
    "cca": "cca:group_size=4,window=9",
    "cca-0": "cca:group_size=3,window=0,rep_bias=log_size,summary=streaming",
    "cca-8": "cca:group_size=4,window=8,entry_bits=8,rep_bias=matched",
    "cca-end": "cca:group_size=4,window=8,summary=prompt,key_pooling=select,value_pooling=max",
    "lca": "lca:group_size=4,window=8",
    "lca-9": "lca:group_size=4,window=4,num_summary_queries=9,rep_bias=log_size,entry_bits=4",
    "lca-mean": "lca:group_size=4,window=8,key_pooling=mean,value_pooling=max",
    "dga": "dga:group_size=4,gamma=0.5,rep_bias=log_size,selection=streaming",
    "dga-prompt": "dga:selection=prompt,group_size=4,gamma=0.5,min_focal=5,num_recent=3,num_random=4,rep_bias=log_size",
    "streaming-llm": "streaming_llm:sink=3,window=11",
    "lm-infinite": "lm_infinite:n_global=5,window=7",
    "dense": "dense",
    "recall": _RECALL,
    "recall-share": _RECALL.replace("=3", "=0.4"),
    "recall-drop": _RECALL + ",unchosen=drop",
    "recall-host": _RECALL + ",store=host,slots=5,store_bits=4",
    "recall-slots": _RECALL + ",store=host,slots=2",
    "recall-exact": _RECALL + ",prompt=exact,store_bits=8",
    "snapkv": "snapkv:window=8,budget=24",
    "a-shape": "a_shape:sink=3,window=11",
    "minference": "minference",
}
B, H, K, D = 2, 4, 2, 16
SCALE, CHUNKS, STEPS = 0.3, (37, 30), 200
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
_SIZES |= {"vocab_size": 199, "initializer_range": 0.2}
LLAMA = LlamaConfig(**_SIZES, num_key_value_heads=K, head_dim=D)
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
MLA = DeepseekV3Config(**_SIZES, **_LATENT, num_key_value_heads=4, first_k_dense_replace=2)
WAYS = {"growing": {}, "beams": {"num_beams": 2}, "lookup": {"prompt_lookup_num_tokens": 3}}
WAYS["static"] = {"cache_implementation": "static", "disable_compile": True}
# hashes by the name of what was hashed
Cells = dict[str, str]


def put(cells: Cells, name: str, *values: object) -> None:
    """Add the hash of ``values``: of tensors dtype, shape and bits."""
    state = hashlib.blake2b(digest_size=8)
    for x in values:
        state.update(f"{x.dtype} {tuple(x.shape)}".encode() if isinstance(x, Tensor) else repr(x).encode())
        if isinstance(x, Tensor):
            state.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    cells[name] = state.hexdigest()


def qkv(L: int, dtype: torch.dtype, seed: int, *, latent: bool = False, rows: int = B) -> list[Tensor]:
    """q ``[B, H, L, D]``, k and v ``[B, K, L, D]``; of latents k has one head and v no width."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((H, D), (1, D), (1, 0)) if latent else ((H, D), (K, D), (K, D))
    return [torch.randn(rows, heads, L, width, generator=generator).to(dtype) for heads, width in shapes]


def whole(cells: Cells, name: str, method: Method, dtype: torch.dtype, backend: str) -> None:
    """Padded rows and packed documents, read at once: outputs, log-sum-exps, gradients."""
    trained = True
    try:
        check_trainable(method)
        method.check_gradients()
    except ValueError:
        trained = False
    for case, given in (("padding", [0, 9]), ("cu_seqlens", [0, 40, 41, 90])):
        inputs = [x.requires_grad_(trained) for x in qkv(90, dtype, 1, rows=1 if case == "cu_seqlens" else B)]
        marks, options = {case: torch.tensor(given)}, {"scale": SCALE, "backend": backend, "return_lse": True}
        out, lse = condense.attention(*inputs, method=method, **options, **marks)
        put(cells, f"{name}/{case}", out, lse)
        if trained:
            put(cells, f"{name}/{case}/gradients", *torch.autograd.grad(out.double().sin().sum(), inputs))


@torch.no_grad()
def cached(cells: Cells, name: str, method: Method, dtype: torch.dtype, *, padded: bool, static: bool, n: int) -> None:
    """Two chunks and ``n`` steps over a cache, of ordinary keys and of latents: outputs, buffers, bytes."""
    for latent in (None, 8):
        if latent and (method.reads_prompt or not method.has_step):
            continue
        cache = StaticCache(config=LLAMA, max_cache_len=sum(CHUNKS) + n) if static else DynamicCache()
        case = f"{name}/latent" if latent else name
        try:
            ensure_layers(cache, {0: method})
            layer = cache.layers[0]
            put(cells, f"{case}/out", *outputs(layer, method, dtype, padded=padded, latent=latent, n=n))
        except ValueError as error:
            put(cells, case, str(error))
            continue
        put(cells, f"{case}/bytes", cache_nbytes(cache))
        for key, x in held(layer):
            put(cells, f"{case}/{key}", x)


def outputs(
    layer: CondensedCacheLayer, method: Method, dtype: torch.dtype, *, padded: bool, latent: int | None, n: int
) -> Iterator[Tensor | None]:
    """Outputs and log-sum-exps of two chunks, and outputs of single tokens, in steps where the layer can."""
    for i, L in enumerate((*CHUNKS, *[1] * n)):
        q, k, v = qkv(L, dtype, i, latent=bool(latent))
        last = (L - 5 if i == 0 else L) if L > 1 else int(i % 5 > 0)
        counts = torch.tensor([L, last]) if padded else None
        if L == 1 and layer.can_step(k, v):
            extras = Extras() if latent or i % 3 else Extras(2.0, torch.linspace(-1, 1, H) if i % 2 else None)
            yield layer.step(NewToken(q, k, v, counts), scale=SCALE, latent_width=latent, extras=extras)
            continue
        request = ReadRequest(q, SCALE, ForwardPlan(L, counts), last if padded else L, latent)
        context = layer.read(k, v, request)
        tensors = *context.entries[:2], *context.window[:2]
        yield from tensors if latent else method.attend(q, context, scale=SCALE, return_lse=L > 1)


def held(layer: CondensedCacheLayer) -> Iterator[tuple[str, Tensor]]:
    """All that a layer keeps, by name, without what has no numbers."""
    buffers = getattr(layer, "buffers", None)
    if buffers is None:
        state, ring = layer.state, layer._ring
        yield from (
            (f"state {i}", x)
            for i, x in enumerate(
                (*state.entries, state.window_k, state.window_v, state.mean_q, torch.as_tensor(state.seen))
            )
        )
        buffers = None if ring is None else ring.buffers
    if buffers is not None:
        yield from ((f"buffer {key}", x) for key, x in buffers._asdict().items() if x.numel())


def paged(cells: Cells, name: str, method: Method, dtype: torch.dtype, backend: str, n: int) -> None:
    """Requests of three lengths in shuffled pages: a piece of a prompt each, then ``n`` single tokens."""
    try:
        plan = serving_plan(method)
    except ValueError as error:
        return put(cells, name, str(error))

    def kind(slots: int, seed: int) -> Pages:
        pages = 3 * -(-(41 + n) // slots)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).int()
        return Pages(torch.zeros(pages, K, slots, 2 * D, dtype=dtype), order.view(3, -1))

    ring = kind(plan.ring_slots, 2) if plan.ring_slots else None
    state, seen, outs = PagedState(kind(SLOTS, 0), kind(SLOTS, 1), ring), [0, 0, 0], []
    for step, lengths in enumerate([(1, 20, 41), *[(1, 1, 1)] * n]):
        seen = [before + new for before, new in zip(seen, lengths, strict=True)]
        q, k, v = (x[0].transpose(0, 1) for x in qkv(sum(lengths), dtype, step, rows=1))
        starts = [0, *itertools.accumulate(lengths)]
        new = NewTokens(starts, seen, torch.tensor(seen, dtype=torch.int32), 3 if step else 1)
        outs.append(torch.zeros_like(q))
        try:
            read_paged((q, k, v), state, new, plan.settings, scale=SCALE, out=outs[-1], backend=backend)
        except ValueError as error:
            return put(cells, name, str(error))
    return put(cells, name, *outs, *(x.cache for x in state[:3] if x is not None))


def generated(cells: Cells, name: str, method: Method) -> None:
    """Tokens of small random models, with latents and without: padded prompts over all kinds of cache."""
    for kind, model_class, config in (("llama", LlamaForCausalLM, LLAMA), ("mla", DeepseekV3ForCausalLM, MLA)):
        torch.manual_seed(0)
        model = model_class(config).eval()
        ids = torch.randint(3, 199, (2, 50), generator=torch.Generator().manual_seed(0))
        mask = (torch.arange(50) >= torch.tensor([[0], [11]])).long()
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        for way, more in WAYS.items():
            rows = slice(1) if way == "lookup" else slice(2)
            try:
                condense.apply(model, method)
                tokens = model.generate(input_ids=ids[rows], attention_mask=mask[rows], **options, **more)
                put(cells, f"{name}/{kind}/{way}", tokens)
            except ValueError as error:
                put(cells, f"{name}/{kind}/{way}", str(error))


def use_kernels() -> None:
    """Let caches take the Triton steps, interpreted, where they would on a GPU."""
    for module in [x for name, x in sys.modules.items() if name.startswith("condense.caches")]:
        if "step_backend" in vars(module):
            module.step_backend = lambda *args, **kwargs: "triton"


def run(path: Path, *, small: bool, interpret: bool) -> None:
    """Write the digest of the package that is imported to ``path``."""
    torch.set_num_threads(1)
    cells, dtypes = Cells(), [torch.float32] if small or interpret else [torch.float32, torch.bfloat16, torch.float64]
    n = 11 if interpret else 30 if small else STEPS
    if interpret:
        use_kernels()
    for name, text in METHODS.items():
        method = Method.parse(text)
        for dtype, static, padded in itertools.product(dtypes, (False, True), (True,) if interpret else (False, True)):
            way = f"{name}/{dtype}/{'static' if static else 'growing'}/{'padded' if padded else 'full'}"
            cached(cells, way, method, dtype, padded=padded, static=static, n=n)
        for dtype, backend in [] if interpret else itertools.product(dtypes, ("reference", "torch")):
            if backend == "torch" or dtype == torch.float64:
                whole(cells, f"{name}/{dtype}/{backend}", method, dtype, backend)
                paged(cells, f"{name}/{dtype}/{backend}/paged", method, dtype, backend, n // 5)
        if not interpret:
            generated(cells, name, method)
    path.write_text(json.dumps(cells, indent=0, sort_keys=True) + "\n")
    print(f"{path}: {len(cells)} hashes")


def compare(before: Path, after: Path) -> int:
    """Print what differs between two digests; 1 if anything does."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    differing = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    for key in differing:
        print(key, "is missing" if key not in new else "is new" if key not in old else "differs")
    print(f"{len(old)} and {len(new)} hashes, {len(differing)} differ")
    return int(bool(differing))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "compare"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--interpret", action="store_true")
    given = parser.parse_args()
    if given.command == "compare":
        sys.exit(compare(*given.paths))
    run(given.paths[0], small=given.small, interpret=given.interpret)
