"""An adapter beside its base model in one engine: each gets the tokens of generate with its own weights."""

import json

import pytest
import torch
from safetensors.torch import save_file
from small_models import condensed, prompts_of, random_llama

import condense

METHODS = [
    condense.CCA(group_size=4, window=24, summary="streaming", key_pooling="select", rep_bias="log_size"),
    condense.Recall(group_size=4, window=24, num_recall=4, unchosen="drop"),
]
LENGTHS, NEW = (150, 31, 64), 16
RANK, ALPHA = 8, 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module", params=METHODS, ids=["pooled", "recall"])
def method(request):
    return request.param


@pytest.fixture(scope="module")
def model(method):
    return condense.apply(random_llama(), method)


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """A folder as PEFT writes it; large weights, so that answers differ."""
    torch.manual_seed(1)
    tensors = {}
    for i in range(model.config.num_hidden_layers):
        for name in PROJECTIONS:
            out, width = model.get_submodule(f"model.layers.{i}.self_attn.{name}").weight.shape
            prefix = f"base_model.model.model.layers.{i}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = 0.1 * torch.randn(RANK, width)
            tensors[f"{prefix}.lora_B.weight"] = 0.1 * torch.randn(out, RANK)
    path = tmp_path_factory.mktemp("adapter")
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": PROJECTIONS, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path, tensors


@pytest.fixture(scope="module")
def wanted(model, method, adapter, greedy):
    """Tokens of the base model, and of the model with the adapter's weights added to its own."""
    base = greedy(model, prompts_of(LENGTHS), NEW)
    merged = condense.apply(random_llama(), method)
    for i in range(merged.config.num_hidden_layers):
        for name in PROJECTIONS:
            a, b = (adapter[1][f"base_model.model.model.layers.{i}.self_attn.{name}.lora_{x}.weight"] for x in "AB")
            merged.get_submodule(f"model.layers.{i}.self_attn.{name}").weight.data += ALPHA / RANK * b @ a
    return base, greedy(merged, prompts_of(LENGTHS), NEW)


def test_base_and_adapter_in_one_engine(engine, model, adapter, wanted, tmp_path):
    """In turn: on a CPU vLLM 0.32 itself confuses them within one batch, for dense models too."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    assert wanted[0] != wanted[1]
    model.save_pretrained(tmp_path)
    started = engine(tmp_path, **condensed(model, max_num_batched_tokens=48, enable_lora=True, max_lora_rank=RANK))
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(LENGTHS)]
    requests = (None, LoRARequest("small", 1, str(adapter[0])))
    for _ in range(2):  # the second time from the prefix cache, which must not mix the two
        for request, want in zip(requests, wanted, strict=True):
            outputs = started.llm.generate(prompts, params, use_tqdm=False, lora_request=request)
            assert [list(output.outputs[0].token_ids) for output in outputs] == want
    assert [output.num_cached_tokens for output in outputs] == [
        (length - 1) // started.page * started.page for length in LENGTHS
    ]
