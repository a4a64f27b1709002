"""Do condensed models in vLLM give the tokens of `generate`? The bundled model, or a random one with eight KV heads.

    python benchmarks/serving/correct.py reference REF.pt [--model wide]
    python benchmarks/serving/correct.py engine REF.pt OUT.json --mode graph --batched-tokens 256

`reference` runs transformers, in float32 and in bfloat16; `engine` runs vLLM on the same prompts, twice, so that the
second time they are found in the prefix cache, and scores a text of 3,900 tokens. In float32 the tokens must be the
same. In bfloat16 the error of log-probabilities against float32 must be at most twice that of transformers.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

import condense
from condense.demo import demo_model, demo_prompt
from condense.results import write_results

METHOD = condense.CCA(window=256, summary="streaming", key_pooling="select", rep_bias="log_size")
NEW = 16
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
    lengths = (1500, 700, 40, 1)
    prompts = [torch.randint(512, (length,)).tolist() for length in lengths]
    return LlamaForCausalLM(config).eval(), prompts, torch.randint(512, (2000,)).tolist()


MODELS = {"bundled": bundled, "wide": wide}


@torch.no_grad()
def reference(args):
    """Tokens that transformers generates, their log-probabilities, and those of the text."""
    model, prompts, text = MODELS[args.model]()
    condense.apply(model, METHOD)
    folder = Path(tempfile.mkdtemp())
    model.save_pretrained(folder)
    model.to(DEVICE)
    content = {"folder": str(folder), "config": model.config.to_dict(), "prompts": prompts, "text": text, "rows": []}
    for ids in prompts:
        row = torch.tensor([ids], device=DEVICE)
        fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW}
        output = model.generate(
            row, attention_mask=torch.ones_like(row), **fixed, output_logits=True, return_dict_in_generate=True
        )
        tokens = output.sequences[0, len(ids) :]
        likely = torch.stack(output.logits)[:, 0].float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        content["rows"].append((tokens.tolist(), likely.cpu()))
    content["text_float32"] = scores(model, text)
    content["text_bfloat16"] = scores(model.bfloat16(), text)
    torch.save(content, args.reference)
    print("reference:", [row[0][:8] for row in content["rows"]], flush=True)


def scores(model, text):
    """Log-probability of every token of a text but the first."""
    ids = torch.tensor([text], device=DEVICE)
    logits = model(ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()


def engine(args):
    """vLLM on the prompts of the reference."""
    import vllm
    from engine import Engine, mode_settings
    from vllm import SamplingParams

    ref = torch.load(args.reference, weights_only=False)
    config = ref["config"]
    overrides = {"architectures": [f"Condensed{config['architectures'][0]}"], "condense": config["condense"]}
    settings = {
        "hf_overrides": overrides, "dtype": args.dtype, "max_model_len": 4096, "max_num_seqs": 8,
        "max_num_batched_tokens": args.batched_tokens, "enable_prefix_caching": args.prefix_caching,
        "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05, "tensor_parallel_size": args.ranks,
        "pipeline_parallel_size": args.stages, "disable_custom_all_reduce": True,
    }  # fmt: skip
    started = Engine(ref["folder"], **settings, **mode_settings(args.mode))
    sampling = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True, "logprobs": 0, "detokenize": False}

    def ask(prompts, **more):
        ids = [{"prompt_token_ids": prompt} for prompt in prompts]
        return started.llm.generate(ids, SamplingParams(**sampling | more), use_tqdm=False)

    rounds = []
    for _ in range(2):
        outputs = ask(ref["prompts"])
        same, error = 0, 0.0
        for output, (tokens, likely) in zip(outputs, ref["rows"], strict=True):
            got = list(output.outputs[0].token_ids)
            same += got == tokens
            if got == tokens:
                chosen = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
                error = max(error, (torch.tensor(chosen) - likely).abs().max().item())
        rounds.append({
            "same_tokens": same, "of": len(ref["rows"]), "largest_difference": error,
            "cached": [output.num_cached_tokens for output in outputs],
        })  # fmt: skip
        print(rounds[-1], flush=True)
    (output,) = ask([ref["text"]], prompt_logprobs=0, max_tokens=1)
    pairs = zip(output.prompt_logprobs[1:], ref["text"][1:], strict=True)
    got = torch.tensor([step[token].logprob for step, token in pairs])
    text = {"vllm": distance(got, ref["text_float32"])}
    text["transformers_bfloat16"] = distance(ref["text_bfloat16"], ref["text_float32"])
    total, free = started.pages
    content = {
        "vllm": vllm.__version__, "model": args.model, "method": str(METHOD), "mode": args.mode, "dtype": args.dtype,
        "batched_tokens": args.batched_tokens, "prefix_caching": args.prefix_caching, "ranks": args.ranks,
        "stages": args.stages, "rounds": rounds, "text_error": text, "pages": total, "free_pages": free,
    }  # fmt: skip
    print(content, flush=True)
    write_results(args.out, content, seed=0, overwrite=True)


def distance(a, b):
    """Root mean square and largest difference of log-probabilities."""
    return {"rms": (a - b).pow(2).mean().sqrt().item(), "max": (a - b).abs().max().item()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["reference", "engine"])
    parser.add_argument("reference", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--model", choices=MODELS, default="bundled")
    parser.add_argument("--mode", choices=["default", "graph", "eager"], default="default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ranks", type=int, default=1, help="that share each layer")
    parser.add_argument("--stages", type=int, default=1, help="of a pipeline, each with layers of its own")
    args = parser.parse_args()
    {"reference": reference, "engine": engine}[args.what](args)


if __name__ == "__main__":
    main()
