"""Gemma 3 and GPT-OSS in vLLM, whose sliding layers are its own: generate's tokens, anew and from the cache."""

import pytest
import torch
from small_models import SIZES, condensed, prompts_of
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GptOssConfig, GptOssForCausalLM
from vllm.distributed import cleanup_dist_env_and_memory

import condense

RECALL = condense.Recall(group_size=4, window=24, num_recall=6, min_recall=4, store_bits=4)
LCA = condense.LCA(group_size=4, window=24, rep_bias="log_size")
METHODS = {
    "recall": RECALL.replace(unchosen="drop"), "exact-8": RECALL.replace(prompt="exact", store_bits=8),
    "means": condense.CCA(group_size=4, window=19, key_pooling="mean", value_pooling="mean", rep_bias="log_size"),
    "streaming": LCA, "allocation": {1: RECALL, "rest": LCA.replace(entry_bits=4)},
    "one-dense-layer": {1: condense.Dense(), "rest": RECALL},
}  # fmt: skip
# read so that no piece of a prompt is one token, which exact prompts leave to Recall
LENGTHS, NEW = (610, 31, 1, 301, 64), 24
KINDS = {"num_hidden_layers": 4, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2}
SETTINGS = {"max_model_len": 1024, "max_num_batched_tokens": 48}


def random_gemma():
    """Queries scaled by another number than their width, rope with a base of its own in either kind of layers."""
    torch.manual_seed(0)
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    }
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **KINDS, query_pre_attn_scalar=24, rope_parameters=rope))
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def random_gpt_oss(sinks=2.0):
    """Sinks that take a good part of the weights, so that no answer is the same without them."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    }  # fmt: skip
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **KINDS, **experts, rope_parameters=rope))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, mean=sinks if name.endswith("sinks") else 0.0, std=0.2)
    return model.eval()


CASES = {f"gemma-{name}": (random_gemma, method) for name, method in METHODS.items()}
CASES |= {f"gpt-oss-{name}": (random_gpt_oss, method) for name, method in METHODS.items()}
# its first answer is another one in float64, and with weights that differ by 3e-7 of their size: a code near a tie
CASES["gpt-oss-exact-4"] = random_gpt_oss, CASES.pop("gpt-oss-exact-8")[1].replace(store_bits=4, num_recall=0.25)


@pytest.mark.parametrize(("make", "method"), CASES.values(), ids=CASES)
def test_tokens_of_generate(engine, greedy, tmp_path, make, method):
    model = condense.apply(make(), method)
    model.save_pretrained(tmp_path)
    want = greedy(model, prompts_of(LENGTHS), NEW)
    started = engine(tmp_path, **condensed(model, **SETTINGS))
    assert started.tokens(prompts_of(LENGTHS), NEW) == want
    outputs = started.generate(prompts_of(LENGTHS), NEW)
    assert [list(output.outputs[0].token_ids) for output in outputs] == want
    page = started.shared
    assert page < LENGTHS[0]
    assert [output.num_cached_tokens for output in outputs] == [(length - 1) // page * page for length in LENGTHS]


def test_vllm_knows_gpt_oss_by_its_condensed_name(engine, tmp_path):
    """Answers are parsed as those of the stock architecture; adapters of experts would be read in another order."""
    model = condense.apply(random_gpt_oss(), RECALL)
    model.save_pretrained(tmp_path)
    settings = condensed(model, **SETTINGS)
    started = engine(tmp_path, **settings)
    assert started.llm.llm_engine.vllm_config.structured_outputs_config.reasoning_parser == "openai_gptoss"
    with pytest.raises(ValueError, match="--enable-lora is not served with condensed GPT-OSS"):
        engine(tmp_path, **settings, enable_lora=True)
    # what vLLM had set up until then, for engines that follow
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("name", ["gpt-oss-recall", "gpt-oss-allocation"])
def test_requests_that_are_put_back(engine, greedy, tmp_path, put_back, name):
    """They lose their pages, those of sliding layers too, and are read again."""
    make, method = CASES[name]
    model, prompts = condense.apply(make(), method), prompts_of((3, 17, 9, 30, 5, 12), seed=2)
    model.save_pretrained(tmp_path)
    want = greedy(model, prompts, 70)
    settings = {**SETTINGS, "max_model_len": 128, "num_gpu_blocks_override": 26}
    started = engine(tmp_path, **condensed(model, scheduler_reserve_full_isl=False, **settings))
    found = put_back(started)
    assert started.tokens(prompts, 70) == want
    assert len(found) >= 3
