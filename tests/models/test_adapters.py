"""Adapters trained on a condensed model carry its methods, and condense their base when PEFT loads them."""

import json

import pytest
import torch
from fresh import run
from models import loading, tiny
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import condense
from condense.models import condensed_layers

# peft still asks transformers by the old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = tiny.tokens(2, 40)
METHODS = {0: tiny.CCA, 1: tiny.CCA, 2: tiny.STREAMING_6}
CLOSE = {"rtol": 0, "atol": 1e-4}


def _lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)


@pytest.fixture
def base(tmp_path):
    tiny.model("llama", torch.float32).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def _condensed(folder):
    return condense.apply(condense.apply(_load(folder), tiny.CCA), tiny.STREAMING_6, layers=[2])


@pytest.fixture
def trained(base, tmp_path):
    model = get_peft_model(_condensed(base), _lora()).eval()
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", tiny.logits(model, IDS)


def test_the_base_is_condensed_when_the_adapter_loads(base, trained):
    folder, expected = trained
    assert json.loads((folder / "condense.json").read_text())["version"] == condense.__version__
    by_transformers = _load(base)
    by_transformers.load_adapter(str(folder))
    for model in (
        PeftModel.from_pretrained(_load(base), folder),
        AutoPeftModelForCausalLM.from_pretrained(folder),
        _load(folder),
        by_transformers,
        PeftModel.from_pretrained(_condensed(base), folder),
    ):
        assert condensed_layers(model) == METHODS
        torch.testing.assert_close(tiny.logits(model.eval(), IDS), expected, **CLOSE)


def test_a_base_condensed_in_another_way_is_refused(base, trained):
    folder, _ = trained
    model = condense.apply(_load(base), tiny.CCA)
    with pytest.raises(ValueError, match=r"was trained with CCA.*, the model has CCA.*condense.restore"):
        PeftModel.from_pretrained(model, folder)
    assert condensed_layers(model) == dict.fromkeys(range(3), tiny.CCA)


def test_without_a_condensed_base_nothing_is_written(base, tmp_path):
    get_peft_model(_load(base), _lora()).save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "condense.json").exists()
    assert not condensed_layers(PeftModel.from_pretrained(_load(base), tmp_path / "plain"))


def test_peft_imported_after_condense(base, trained):
    run(loading.import_peft_after_condense, trained[0])
