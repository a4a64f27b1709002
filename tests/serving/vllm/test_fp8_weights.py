"""Weights in FP8 are vLLM's: they cost condensed models what they cost vLLM's dense attention."""

import copy

import pytest
import torch
from small_models import LATENTS, condensed, prompts_of, random_llama
from transformers.models.auto import AutoModelForCausalLM

import condense

PROMPTS, NEW = prompts_of((230, 31, 64)), 24
# without choices: which of two groups, or tokens, that are almost as good is taken, rounding decides
METHODS = {
    "recall": condense.Recall(group_size=4, window=24, num_recall=64, store_bits=16),
    "pooled": condense.CCA(group_size=4, window=24, key_pooling="mean", value_pooling="mean", rep_bias="log_size"),
}


def latents():
    """MiniCPM3 with widths that all of vLLM's kernels for FP8 take."""
    torch.manual_seed(0)
    config = copy.deepcopy(LATENTS["minicpm3"])
    config.q_lora_rank = 32
    return AutoModelForCausalLM.from_config(config).eval()


MODELS = {"heads": random_llama, "latents": latents}
STEP = 2**-9


def model_of(make):
    """A model of layers whose weights FP8 holds exactly, with one scale per output channel."""
    model, generator = make(), torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "_proj" in name:
            codes = (150 * torch.randn(weight.shape, generator=generator)).clamp(-448, 448)
            # the largest code, which sets the scale
            codes[:, 0] = 448
            weight.data = codes.to(torch.float8_e4m3fn).float() * STEP
    return model


@torch.no_grad()
def scores(model, prompt, answer):
    """Log-probability of each token of an answer, read token by token."""
    out, found = model(torch.tensor([prompt]), use_cache=True), []
    for token in answer:
        found.append(out.logits[0, -1].float().log_softmax(-1)[token])
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
    return torch.stack(found)


def error(engine, model, folder):
    """Error of the log-probabilities of vLLM's answers, as a multiple of that of transformers in bfloat16."""
    model.save_pretrained(folder)
    is_dense = getattr(model.config, "condense", None) is None
    own = {"skip_tokenizer_init": True, "max_model_len": 512} if is_dense else condensed(model)
    started = engine(folder, dtype="bfloat16", quantization="fp8_per_channel", **own)
    runner = started.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    quantised = {p.dtype for name, p in runner.model.named_parameters() if name.endswith("_proj.weight")}
    assert quantised == {torch.float8_e4m3fn}
    rounded, wrong, in_bfloat16 = copy.deepcopy(model).bfloat16(), [], []
    for output, prompt in zip(started.generate(PROMPTS, NEW, logprobs=0), PROMPTS, strict=True):
        answer = output.outputs[0]
        got = [chosen[token].logprob for chosen, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        exact, plain = (scores(each, prompt, answer.token_ids) for each in (model, rounded))
        wrong.append(torch.tensor(got) - exact)
        in_bfloat16.append(plain - exact)
    return (torch.cat(wrong).norm() / torch.cat(in_bfloat16).norm()).item()


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_answers(engine, tmp_path, make):
    dense = error(engine, model_of(make), tmp_path / "dense")
    for name, method in METHODS.items():
        got = error(engine, condense.apply(model_of(make), method), tmp_path / name)
        assert got <= 2 * max(dense, 1), (name, got, dense)
