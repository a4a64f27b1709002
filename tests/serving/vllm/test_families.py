"""All model classes that are served, each a random model and the bundled one: generate's tokens, and refusals."""

import math
import os
import subprocess
import sys

import pytest
import torch
from models import tiny
from small_models import LATENTS, condensed, prompts_of, random_latents, random_llama
from small_models import SIZES as WIDTHS
from transformers import AutoConfig, Gemma3ForCausalLM, Gemma3TextConfig, GptOssConfig, GptOssForCausalLM
from transformers.models.auto import AutoModelForCausalLM
from vllm import ModelRegistry
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.deepseek_v2 import DeepseekV2Attention
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

import condense
from condense.demo import demo_model, demo_prompt
from condense.serving.vllm import models
from condense.serving.vllm.latents import entry_widths
from condense.serving.vllm.register import ARCHITECTURES

METHOD = condense.CCA(group_size=4, window=24, summary="streaming", key_pooling="select", rep_bias="log_size")
LENGTHS, NEW = (130, 20), 12
SIZES = WIDTHS | {"num_hidden_layers": 2}
# type -> settings
CONFIGS = {
    "gemma": SIZES,
    "gpt2": {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 512, "vocab_size": 199, "initializer_range": 0.2},
    "mistral": SIZES | {"sliding_window": None},
    "opt": {
        "vocab_size": 199, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 512, "word_embed_proj_dim": 64, "init_std": 0.2, "do_layer_norm_before": True,
    },
    "phi3": SIZES | {"num_attention_heads": 2, "pad_token_id": 0, "sliding_window": None},
    # vLLM takes the width of a head from the hidden size
    "qwen2": SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": SIZES,
    "qwen3_moe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}  # fmt: skip
BUNDLED = {
    "pooled": METHOD.replace(group_size=16, window=256),
    "recall": condense.Recall(window=256, num_recall=32, store_bits=4, unchosen="drop"),
}
REFUSED = [
    ([0], {}, "all layers of a model with latents .* dense attention in layers 1"),
    (None, {"enable_lora": True}, "--enable-lora is not served with latents"),
]
RECALL = condense.Recall(group_size=4, window=24, num_recall=6, min_recall=4, store_bits=4)
# one layer of each kind; Recall opens 4 of the 26 groups that close in the longer prompt
BOTH = {0: METHOD, "rest": RECALL.replace(num_recall=4, store_bits=16, unchosen="drop")}
LCA = condense.LCA(group_size=4, window=24, rep_bias="log_size")
RANKS = {"pooled": LCA, "recall": RECALL.replace(num_recall=2, prompt="exact", store="host")}
SLIDING = {
    "recall": RECALL.replace(unchosen="drop"), "exact-8": RECALL.replace(prompt="exact", store_bits=8),
    "means": condense.CCA(group_size=4, window=19, key_pooling="mean", value_pooling="mean", rep_bias="log_size"),
    "streaming": LCA, "allocation": {1: RECALL, "rest": LCA.replace(entry_bits=4)},
    "one-dense-layer": {1: condense.Dense(), "rest": RECALL},
}  # fmt: skip
# read so that no piece of a prompt is one token, which exact prompts leave to Recall
LONG, MORE = (610, 31, 1, 301, 64), 24
KINDS = {"num_hidden_layers": 4, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2}
PIECES = {"max_model_len": 1024, "max_num_batched_tokens": 48}
# all that vLLM does before it looks at a device
START = """
import sys
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model=sys.argv[1], skip_tokenizer_init=True).create_model_config()
"""


@pytest.fixture(scope="module", autouse=True)
def _known_classes():
    """vLLM asks a process of its own about each class that it knows by name only, as plugins name them: 20 s each."""
    load_general_plugins()
    for architecture in ARCHITECTURES:
        name = f"Condensed{architecture}"
        ModelRegistry.register_model(name, getattr(models, name))


@pytest.mark.parametrize("family", CONFIGS | LATENTS)
def test_tokens_of_generate(engine, greedy, tmp_path, family):
    torch.manual_seed(0)
    config = LATENTS[family] if family in LATENTS else AutoConfig.for_model(family, **CONFIGS[family])
    model = condense.apply(AutoModelForCausalLM.from_config(config).eval(), BOTH)
    model.save_pretrained(tmp_path)
    want = greedy(model, prompts_of(LENGTHS), NEW)
    assert any(len(set(row)) > 2 for row in want)
    started = engine(tmp_path, skip_tokenizer_init=True, max_model_len=512, max_num_batched_tokens=48)
    assert started.tokens(prompts_of(LENGTHS), NEW) == want


@pytest.mark.parametrize("method", BUNDLED.values(), ids=BUNDLED)
def test_questions_on_one_text_to_the_bundled_model(engine, greedy, method):
    model, tokenizer = demo_model()
    condense.apply(model, method)
    prompt = demo_prompt()
    ids = [tokenizer.encode(prompt.text + question) for question in prompt.questions[:2]]
    want = greedy(model, ids, 8)
    settings = {"max_model_len": 4352, "max_num_batched_tokens": 512}
    started = engine(model.name_or_path, **condensed(model, **settings))
    outputs = started.generate(ids[:1], 8, logprobs=0) + started.generate(ids[1:], 8, logprobs=0)
    assert [list(output.outputs[0].token_ids) for output in outputs] == want
    assert [output.num_cached_tokens for output in outputs] == [0, 3907 // started.page * started.page]
    for output, row, number in zip(outputs, want, prompt.expected, strict=False):
        assert number in tokenizer.decode(row)
        likely = [chosen[token].logprob for chosen, token in zip(output.outputs[0].logprobs, row, strict=True)]
        assert math.fsum(likely) > -5


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or a CPU")
@pytest.mark.parametrize("method", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("family", ["deepseek_v2", "minicpm3"])
def test_latents_on_two_ranks(outputs_of, family, method):
    """Each has half of the heads, which weigh and choose groups together; anew and from the prefix cache."""
    settings = {"tensor_parallel_size": 2, "max_num_batched_tokens": 48}
    outputs_of(condense.apply(random_latents(family), method), prompts_of(LENGTHS), NEW, **settings)


@pytest.mark.parametrize("plugins", ["", "condense"], ids=["without", "with"])
def test_a_saved_folder_without_the_plugin_is_refused(tmp_path, plugins):
    condense.apply(random_llama(), METHOD).save_pretrained(tmp_path)
    command, env = [sys.executable, "-c", START, str(tmp_path)], {**os.environ, "VLLM_PLUGINS": plugins}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode == 0) == bool(plugins), done.stderr
    if not plugins:
        assert "['CondensedLlamaForCausalLM'] are not supported" in done.stderr


@pytest.mark.parametrize(("layers", "settings", "words"), REFUSED, ids=["dense-layer", "lora"])
def test_what_is_refused_of_latents(engine, tmp_path, layers, settings, words):
    """Before a weight is read."""
    model = condense.apply(condense.restore(random_latents()), METHOD, layers)
    model.save_pretrained(tmp_path)
    tiny.refused(words, engine, tmp_path, **condensed(model), **settings)
    # what vLLM had set up until then, for engines that follow
    cleanup_dist_env_and_memory()


def test_a_configuration_that_makes_attention_bidirectional_is_refused(engine, tmp_path):
    """As some embedding models' do: condensed layers would read it as causal, and so give other vectors."""
    model = condense.apply(random_llama(), METHOD)
    model.save_pretrained(tmp_path)
    settings = condensed(model)
    settings["hf_overrides"]["is_causal"] = False
    tiny.refused("bidirectional attention .* cannot be condensed", engine, tmp_path, **settings)
    # what vLLM had set up until then, for engines that follow
    cleanup_dist_env_and_memory()


def a_module(cls, rope):
    """A module of vLLM's with latents, without weights."""
    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    module.kv_lora_rank, module.qk_rope_head_dim, module.rotary_emb = 32, 16, rope
    return module


def test_modules_that_hand_over_no_latents_and_a_rotation_that_is_wrong_on_a_cpu():
    """Those of DeepSeek with VLLM_MLA_DISABLE=1. Once vLLM's kernel takes no heads for tokens, none need be refused."""
    without = a_module(DeepseekV2Attention, None)
    tiny.refused(r"DeepseekV2Attention expands its latents.* unset VLLM_MLA_DISABLE", entry_widths, without)
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(16, 64, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, is_neox_style=False)
    wrapper = a_module(MultiHeadLatentAttentionWrapper, rope)
    if not current_platform.is_cpu():
        assert entry_widths(wrapper) == (32, 16)
        return
    q, k, positions = torch.randn(5, 2, 16), torch.randn(5, 1, 16), torch.arange(5)
    want, got = (f(positions, q.clone(), k.clone()) for f in (rope.forward_native, rope.forward_cpu))
    assert not torch.equal(got[0], want[0])
    tiny.refused("must be those of YaRN", entry_widths, wrapper)


def random_gemma():
    """Queries scaled by another number than their width, rope with a base of its own in either kind of layers."""
    torch.manual_seed(0)
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    }
    model = Gemma3ForCausalLM(Gemma3TextConfig(**WIDTHS, **KINDS, query_pre_attn_scalar=24, rope_parameters=rope))
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
    model = GptOssForCausalLM(GptOssConfig(**WIDTHS, **KINDS, **experts, rope_parameters=rope))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, mean=sinks if name.endswith("sinks") else 0.0, std=0.2)
    return model.eval()


CASES = {f"gemma-{name}": (random_gemma, method) for name, method in SLIDING.items()}
CASES |= {f"gpt-oss-{name}": (random_gpt_oss, method) for name, method in SLIDING.items()}
# its first answer is another one in float64, and with weights that differ by 3e-7 of their size: a code near a tie
CASES["gpt-oss-exact-4"] = random_gpt_oss, CASES.pop("gpt-oss-exact-8")[1].replace(store_bits=4, num_recall=0.25)


@pytest.mark.parametrize(("make", "method"), CASES.values(), ids=CASES)
def test_tokens_of_generate_with_sliding_layers(outputs_of, engines, make, method):
    outputs = outputs_of(condense.apply(make(), method), prompts_of(LONG), MORE, **PIECES)
    (page,) = (started.page for started in engines.values())
    assert page < LONG[0]
    assert [output.num_cached_tokens for output in outputs] == [(length - 1) // page * page for length in LONG]


def test_vllm_knows_gpt_oss_by_its_condensed_name(engine, tmp_path):
    """Answers are parsed as those of the stock architecture; adapters of experts would be read in another order."""
    model = condense.apply(random_gpt_oss(), RECALL)
    model.save_pretrained(tmp_path)
    settings = condensed(model, **PIECES)
    started = engine(tmp_path, **settings)
    assert started.llm.llm_engine.vllm_config.structured_outputs_config.reasoning_parser == "openai_gptoss"
    tiny.refused("--enable-lora is not served with condensed GPT-OSS", engine, tmp_path, **settings, enable_lora=True)
    # what vLLM had set up until then, for engines that follow
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("name", ["gpt-oss-recall", "gpt-oss-allocation"])
def test_requests_that_are_put_back_with_sliding_layers(engine, greedy, tmp_path, put_back, name):
    make, method = CASES[name]
    model, prompts = condense.apply(make(), method), prompts_of((3, 17, 9, 30, 5, 12), seed=2)
    model.save_pretrained(tmp_path)
    want = greedy(model, prompts, 70)
    settings = {**PIECES, "max_model_len": 128, "num_gpu_blocks_override": 26}
    started = engine(tmp_path, **condensed(model, scheduler_reserve_full_isl=False, **settings))
    found = put_back(started)
    for layer in started.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
        if getattr(layer, "sliding_window", None):
            # as what condensed layers leave in a block may be to vLLM's own, which get it next
            layer.kv_cache[1:] = math.nan
    assert started.tokens(prompts, 70) == want
    assert len(found) >= 3
