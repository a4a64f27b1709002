"""Do condensed models in vLLM give the tokens of `generate`? The bundled model, or a random one with eight KV heads.

    python benchmarks/serving/correct.py reference REF.pt [--model wide] [--adapter]
    python benchmarks/serving/correct.py engine REF.pt OUT.json --mode graph --batched-tokens 256

`reference` runs transformers, in float32 and in bfloat16; `engine` runs vLLM on the same prompts, twice, so that the
second time they are found in the prefix cache, and scores a text of 3,900 tokens. In float32 the tokens must be the
same. In bfloat16 the error of log-probabilities against float32 must be at most twice that of transformers, on the text
and on vLLM's own answers.

With --drafts vLLM drafts so many tokens of each step by n-grams; in float32 the tokens must still be those of
`generate`, which drafts nothing.

With --adapter every prompt is asked twice in one batch, of the model and of the model with a random LoRA adapter, whose
weights transformers has added to its own.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

import condense
from condense.caches import CACHE
from condense.demo import demo_model, demo_prompt
from condense.results import write_results

RANK, ALPHA = 8, 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
METHOD = condense.CCA(window=256, summary="streaming", key_pooling="select", rep_bias="log_size")
NEW = 16
# tokens of a random model's prompts
LENGTHS = (1500, 700, 40, 1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def bundled():
    """Model, prompts that ask for the hidden numbers, and a text to score."""
    model, tokenizer = demo_model()
    prompt = demo_prompt()
    text = tokenizer.encode(prompt.text)
    return model, [tokenizer.encode(prompt.text + question) for question in prompt.questions], text


def wide():
    """A random model with eight KV heads, for several ranks, and weights so large that answers differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 768, "head_dim": 64, "vocab_size": 512}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 3}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=4096, initializer_range=0.1)
    prompts = [torch.randint(512, (length,)).tolist() for length in LENGTHS]
    return LlamaForCausalLM(config).eval(), prompts, torch.randint(512, (2000,)).tolist()


def latents():
    """A random model on latents of DeepSeek-V2's widths, without experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 3, "vocab_size": 512}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None}
    widths = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3}
    # as DeepSeek-V2 stretches its positions
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
    config = DeepseekV2Config(
        **sizes, **heads, **widths, rope_parameters=rope | {"mscale": 0.707, "mscale_all_dim": 0.707},
        max_position_embeddings=4096, initializer_range=0.1,
    )  # fmt: skip
    prompts = [torch.randint(512, (length,)).tolist() for length in LENGTHS]
    return DeepseekV2ForCausalLM(config).eval(), prompts, torch.randint(512, (2000,)).tolist()


def device_of(model):
    """The device of the reference: kernels in float32 for latents this wide take minutes to compile."""
    return "cpu" if model == "latents" else DEVICE


MODELS = {"bundled": bundled, "wide": wide, "latents": latents}


def make_adapter(model):
    """A folder as PEFT writes it, with weights large enough to change every score."""
    from safetensors.torch import save_file

    tensors, folder = {}, Path(tempfile.mkdtemp())
    for name, module in projections(model):
        out, width = module.weight.shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = 0.05 * torch.randn(RANK, width)
        tensors[f"base_model.model.{name}.lora_B.weight"] = 0.05 * torch.randn(out, RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": PROJECTIONS, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def projections(model):
    return [(name, x) for name, x in model.named_modules() if name.rpartition(".")[2] in PROJECTIONS]


def load(folder, adapter, device):
    """The saved model in float32, with the weights of an adapter added to its own, unless that is None."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    if adapter is not None:
        tensors = load_file(Path(adapter) / "adapter_model.safetensors")
        for name, module in projections(model):
            a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"].to(device) for x in "AB")
            module.weight.data += ALPHA / RANK * b @ a
    return model


@torch.no_grad()
def reference(args):
    """Tokens that transformers generates, and the log-probabilities of a text; of the model, and with an adapter."""
    model, prompts, text = MODELS[args.model]()
    condense.apply(model, args.method or METHOD)
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    content = {"folder": folder, "method": args.method or str(METHOD), "prompts": prompts, "text": text, "variants": []}
    for adapter in [None, make_adapter(model)] if args.adapter else [None]:
        model = load(folder, adapter, device_of(args.model))
        variant = {"adapter": adapter, "tokens": [generated(model, ids) for ids in prompts]}
        variant["text_float32"] = scores(model, text)
        variant["text_bfloat16"] = scores(model.bfloat16(), text)
        content["variants"].append(variant)
        print("reference:", adapter, [tokens[:8] for tokens in variant["tokens"]], flush=True)
    torch.save(content, args.reference)


def generated(model, ids):
    row = torch.tensor([ids], device=model.device)
    fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW}
    return model.generate(row, attention_mask=torch.ones_like(row), **fixed)[0, len(ids) :].tolist()


@torch.no_grad()
def scores(model, text):
    """Log-probability of every token of a text but the first."""
    ids = torch.tensor([text], device=model.device)
    logits = model(ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()


@torch.no_grad()
def scores_of_answer(model, prompt, answer):
    """Log-probability of every token of an answer, the prompt read at once and the answer token by token."""
    out, found = model(torch.tensor([prompt], device=model.device), use_cache=True, logits_to_keep=1), []
    for token in answer:
        found.append(out.logits[0, -1].float().log_softmax(-1)[token])
        step = torch.tensor([[token]], device=model.device)
        out = model(step, **{CACHE: out[CACHE]}, use_cache=True)
    return torch.stack(found).cpu()


def engine(args):
    """vLLM on the prompts of the reference."""
    import vllm
    from engine import Engine, mode_settings
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    ref = torch.load(args.reference, weights_only=False)
    prompts, variants = ref["prompts"], ref["variants"]
    settings = {
        "dtype": args.dtype, "max_model_len": 4096, "max_num_seqs": 8,
        "max_num_batched_tokens": args.batched_tokens, "enable_prefix_caching": args.prefix_caching,
        "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.02, "tensor_parallel_size": args.ranks,
        "pipeline_parallel_size": args.stages, "disable_custom_all_reduce": True,
    }  # fmt: skip
    if len(variants) > 1:
        settings |= {"enable_lora": True, "max_lora_rank": RANK}
    if args.drafts > 0:
        drafts = {"num_speculative_tokens": args.drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        settings |= {"speculative_config": {"method": "ngram"} | drafts, "disable_log_stats": False}
    started = Engine(ref["folder"], **settings, **mode_settings(args.mode))
    sampling = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    lora = [None if v["adapter"] is None else LoRARequest("adapter", 1, v["adapter"]) for v in variants]

    def ask(prompts, **more):
        """Each prompt of each variant: lists of outputs, by variant."""
        ids, params = [{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(**sampling | more)
        if DEVICE == "cpu":  # there vLLM 0.32 confuses adapters within one batch, for dense models too
            return [started.llm.generate(ids, params, use_tqdm=False, lora_request=request) for request in lora]
        requests = [request for request in lora for _ in ids]
        outputs = started.llm.generate(ids * len(lora), params, use_tqdm=False, lora_request=requests)
        return [outputs[i : i + len(ids)] for i in range(0, len(outputs), len(ids))]

    answers = [ask(prompts), ask(prompts)]
    texts = [outputs[0].prompt_logprobs[1:] for outputs in ask([ref["text"]], prompt_logprobs=0, max_tokens=1)]
    device = device_of(args.model)
    results = [
        compare(ref, variant, [answer[i] for answer in answers], texts[i], device) for i, variant in enumerate(variants)
    ]
    total, free = started.pages
    content = {
        "vllm": vllm.__version__, "model": args.model, "method": ref["method"], "mode": args.mode, "dtype": args.dtype,
        "batched_tokens": args.batched_tokens, "prefix_caching": args.prefix_caching, "ranks": args.ranks,
        "stages": args.stages, **results[0], "pages": total, "free_pages": free,
    }  # fmt: skip
    if args.drafts > 0:
        counts = {x.name: x.value for x in started.llm.get_metrics() if hasattr(x, "value")}
        names = {name: f"vllm:spec_decode_num_{name}_tokens" for name in ("draft", "accepted")}
        content["drafts"] = {"tokens": args.drafts, **{name: counts[full] for name, full in names.items()}}
    if len(variants) > 1:
        change = distance(variants[1]["text_float32"], variants[0]["text_float32"])
        content["with_adapter"] = {"change": change, **results[1]}
    print(content, flush=True)
    write_results(args.out, content, seed=0, overwrite=True)


def compare(ref, variant, answers, text, device):
    """Errors of two rounds of answers and of the scores of a text, and those of transformers in bfloat16."""
    model, rounds = load(ref["folder"], variant["adapter"], device), []
    rounded = load(ref["folder"], variant["adapter"], device).bfloat16()
    for outputs in answers:
        # scored are vLLM's own answers, which in bfloat16 need not be those of transformers
        tokens = [list(o.outputs[0].token_ids) for o in outputs]
        pairs = list(zip(ref["prompts"], tokens, strict=True))
        got = torch.tensor([chosen(o.outputs[0].logprobs, o.outputs[0].token_ids) for o in outputs]).flatten()
        exact, plain = (torch.cat([scores_of_answer(m, *pair) for pair in pairs]) for m in (model, rounded))
        rounds.append({
            "same_tokens": sum(a == b for a, b in zip(tokens, variant["tokens"], strict=True)), "of": len(tokens),
            "error": {"vllm": distance(got, exact),
                      "transformers_bfloat16": distance(plain, exact)},
            "cached": [o.num_cached_tokens for o in outputs],
        })  # fmt: skip
    error = {"vllm": distance(torch.tensor(chosen(text, ref["text"][1:])), variant["text_float32"])}
    error["transformers_bfloat16"] = distance(variant["text_bfloat16"], variant["text_float32"])
    return {"rounds": rounds, "text_error": error}


def chosen(likely, tokens):
    """vLLM's log-probabilities of these tokens."""
    return [step[token].logprob for step, token in zip(likely, tokens, strict=True)]


def distance(a, b):
    """Root mean square and largest difference of log-probabilities."""
    return {"rms": (a - b).pow(2).mean().sqrt().item(), "max": (a - b).abs().max().item()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["reference", "engine"])
    parser.add_argument("reference", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--model", choices=MODELS, default="bundled")
    parser.add_argument("--adapter", action="store_true", help="the model with a random LoRA adapter too")
    parser.add_argument("--method", help="of the reference, as of condense serve. Default: pooling")
    parser.add_argument("--mode", choices=["default", "graph", "eager"], default="default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--drafts", type=int, default=0, help="tokens drafted by n-grams before each step")
    parser.add_argument("--ranks", type=int, default=1, help="that share each layer")
    parser.add_argument("--stages", type=int, default=1, help="of a pipeline, each with layers of its own")
    args = parser.parse_args()
    {"reference": reference, "engine": engine}[args.what](args)


if __name__ == "__main__":
    main()
