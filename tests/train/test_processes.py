"""Two processes (gloo), by DDP and by FSDP2, against one: the same losses, of packed documents."""

import json
import math

import pytest
from fresh import run_ranks
from small_models import saved_with_tokenizer, tiny_llama
from train import runs
from train.runs import logged
from transformers import AutoModelForCausalLM

from condense.models import condensed_layers

FSDP2 = {
    "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip
TOKENS = 4 * 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("processes")
    lines = [json.dumps({"text": chapter}) for chapter in text.split("Chapter")[1:]]
    (path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    saved_with_tokenizer(tiny_llama(hidden_size=32, intermediate_size=64, initializer_range=0.2), path / "base")
    return path


def launched(folder, *wanted, count=2):
    run_ranks(count, runs.run_all, folder, *wanted, **FSDP2)
    parts = [run.split(":") for run in wanted]
    return [losses(folder / name, how) for name, _, how in parts if how not in ("begun", "refused")]


def losses(output, how):
    phase, entries = logged(output)
    assert phase["resumed_from"] == (None if how == "whole" else "checkpoint-2")
    assert len(entries) == 4
    return [entry["loss"] for entry in entries]


@pytest.fixture(scope="module")
def one(folder):
    runs.adapt(folder, "one", "all", "whole")
    return losses(folder / "one", "whole")


def same(losses):
    # A loss is a mean over the step's tokens, added up in another order: two sums of float32 numbers, each within
    # log2(tokens) roundings. A weight may be updated otherwise where its gradient is rounding noise, and moves the loss
    # by the product of the two, which is less.
    return pytest.approx(losses, rel=2 * math.log2(TOKENS) * 2**-24)


def test_two_processes_have_the_losses_of_one_also_after_a_kill(folder, one):
    shared, spread = launched(folder, "ddp-odd:all:refused", "ddp:all:killed", "fsdp:all:killed")
    assert not list(folder.glob("ddp-odd*"))
    assert shared == same(one)
    assert spread == same(one)
    expected = AutoModelForCausalLM.from_pretrained(folder / "one").state_dict()
    gathered = AutoModelForCausalLM.from_pretrained(folder / "fsdp")
    assert condensed_layers(gathered)
    assert expected.keys() == gathered.state_dict().keys()


@pytest.mark.slow  # the test above resumes killed runs too, and test_adapt.py trains adapters in one process
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_killed_runs_are_the_whole_ones_bit_for_bit_and_adapters_spread(folder):
    whole, killed, lora = launched(folder, "ddp-whole:all:whole", "ddp-killed:all:killed", "fsdp-lora:lora:killed")
    assert killed == whole
    runs.adapt(folder, "one-lora", "lora", "whole")
    assert lora == same(losses(folder / "one-lora", "whole"))
    adapters = {path.name for path in (folder / "fsdp-lora").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "condense.json"} <= adapters
    assert "model.safetensors" not in adapters


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_run_of_two_processes_goes_on_in_four(folder, one):
    launched(folder, "ddp-more:all:begun", "fsdp-more:all:begun")
    for found in launched(folder, "ddp-more:all:resumed", "fsdp-more:all:resumed", count=4):
        assert found == same(one)
