"""FLOPs of a step against PyTorch's counter, and their share of the GPU's peak in the log."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from train.interruption import interrupted_at
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import condense
from condense.models.inspect import attention_flops, inspect
from condense.train import RECIPES, PhaseConfig, run_training
from condense.train import trainer as trainer_module
from condense.train.flops import device_peak, step_flops

# transformers' own, of PEFT
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
B, L, H, K, D, LAYERS = 2, 64, 4, 2, 8, 2
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": H, "num_key_value_heads": K,
}  # fmt: skip
METHOD = condense.CCA(group_size=4, window=8)
CAUSAL = LAYERS * 4 * H * D * L * (L + 1) // 2


def phase(**changes):
    fields = {"name": "p", "steps": 4, "sequence_length": L, "batch_size": B, "mix": "alternate", "method": METHOD}
    return PhaseConfig(**fields | changes)


@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_step_is_what_pytorch_counts(tied):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied, attn_implementation="eager"))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(B, L, dtype=torch.long), use_cache=False).logits.sum().backward()
    # the eager forward computes all L * L scores
    rest = 3 * B * (LAYERS * 4 * H * D * L * L - CAUSAL)
    assert step_flops(model, phase())[None] == counter.get_total_flops() - rest


def test_condensed_steps_have_the_attention_of_inspect():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    dense, condensed = attention_flops(model, None, L), attention_flops(model, METHOD, L)
    reports = inspect(model, METHOD, L)
    assert (dense, condensed) == (sum(r.dense_flops for r in reports), sum(r.flops for r in reports))
    assert dense == CAUSAL > condensed
    flops = step_flops(model, phase())
    assert flops[None] - flops[METHOD] == 3 * B * (dense - condensed)
    growing = step_flops(model, phase(mix="condensed", group_sizes=(2,)))
    assert growing.keys() == {METHOD, METHOD.replace(group_size=2)}


def test_frozen_weights_adapters_and_the_teacher():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    whole = step_flops(model, phase())[METHOD]
    base = sum(p.numel() for p in model.parameters() if p.dim() == 2) - model.get_input_embeddings().weight.numel()
    teacher = B * (2 * base * L + CAUSAL)
    assert step_flops(model, phase(distill=1.0))[METHOD] == whole + teacher
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapters = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    lora = whole - B * L * (2 * base - 6 * adapters)
    assert step_flops(adapted, phase())[METHOD] == lora
    assert step_flops(adapted, phase(distill=1.0))[METHOD] == lora + teacher


def test_experts_are_not_counted():
    assert step_flops(MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)), phase()) is None


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA H100 PCIe", None)]
)
def test_peaks_are_of_whole_known_gpus(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert device_peak() == peak


def test_the_share_stands_in_the_log_also_of_a_resumed_run(tmp_path, text_file, monkeypatch, capsys):
    seconds = itertools.count()
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(trainer_module, "device_peak", lambda: 1e9)
    recipe = RECIPES["smoke"]([text_file], tmp_path / "model")
    (mixed,) = [phase for phase in recipe.phases if phase.mix == "alternate"]
    run = dataclasses.replace(recipe, phases=(mixed,))  # 6 steps, an entry every 2, a checkpoint every 3
    with interrupted_at(4):
        run_training(run)
    run_training(run, resume=True)
    log = [json.loads(line) for line in (run.output / "log-mixed.jsonl").read_text().splitlines()]
    model = LlamaForCausalLM.from_pretrained(run.output)
    flops = step_flops(model, mixed)
    dense, condensed = (flops[method] / 1e9 for method in (None, mixed.method))
    tokens = mixed.batch_size * mixed.sequence_length
    # the clock goes one second from entry to entry; the resumed run has one step, the fourth, before its first entry
    shares = {2: dense + condensed, 4: condensed, 6: dense + condensed}
    assert [entry["step"] for entry in log] == [2, 4, 4, 6]
    for entry in (log[0], *log[2:]):
        assert entry["peak_share"] == pytest.approx(shares[entry["step"]], abs=5e-5)
        assert entry["tokens_per_second"] == tokens * (1 if entry["step"] == 4 else 2)
    assert f"peak_share {log[-1]['peak_share']:.4g}" in capsys.readouterr().out


def test_an_unknown_device_has_no_share(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(trainer_module, "device_peak", lambda: None)
    run = RECIPES["smoke"]([text_file], tmp_path / "model").with_steps(2)
    run_training(dataclasses.replace(run, phases=run.phases[1:]))
    (line,) = (run.output / "log-mixed.jsonl").read_text().splitlines()
    assert "tokens_per_second" in line
    assert "peak_share" not in line
