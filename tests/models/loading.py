"""Loaded by processes of their own; functions import condense, so that they can do without it first."""

import sys

import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def without_and_with_condense(folder, names):
    ids = torch.load(folder / "ids.pt")

    def loaded(name):
        try:
            model = AutoModelForCausalLM.from_pretrained(folder / name)
        except ValueError as error:
            return str(error)
        return model(ids).logits, type(next(m for m in model.modules() if hasattr(m, "layer_idx"))).__name__

    result = {"without": {name: loaded(name) for name in names}}
    assert "condense" not in sys.modules
    # condense is imported by what the pickle names
    result["pickled"] = torch.load(folder / "module.pt", weights_only=False)(ids).logits
    import condense  # noqa: F401

    result["with"] = {name: loaded(name) for name in names}
    torch.save(result, folder / "fresh.pt")


def import_peft_after_condense(folder):
    from condense.models import condensed_layers

    assert "peft.peft_model" not in sys.modules
    from peft import AutoPeftModelForCausalLM

    assert len(condensed_layers(AutoPeftModelForCausalLM.from_pretrained(folder))) == 3
