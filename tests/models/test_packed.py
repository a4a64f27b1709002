"""Packed documents in a model: one call of attention per layer, however many documents there are."""

import pytest
import torch
from models import tiny

import condense
from condense.models import attention

LENGTHS = [23, 1, 30, 7]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("how", ["positions", "marks"])
@pytest.mark.parametrize(
    ("method", "calls"),
    [(condense.CCA(group_size=4, window=6), 1), (condense.Recall(group_size=4, window=6, num_recall=2), 4)],
    ids=["cca", "recall"],
)
def test_calls_per_layer(name, how, method, calls, monkeypatch):
    model, count = condense.apply(tiny.model(name), method), []
    read = {"llama": "_condensed", "deepseek_v3": "condensed_latents"}[name]
    run = getattr(attention, read)
    monkeypatch.setattr(attention, read, lambda *args: count.append(1) or run(*args))
    kwargs = {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    if how == "marks":
        marks = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0).to(torch.int32)
        kwargs |= {"cu_seq_lens_q": marks, "cu_seq_lens_k": marks, "max_length_q": 30, "max_length_k": 30}
    tiny.logits(model, tiny.tokens(1)[:, : sum(LENGTHS)], **kwargs)
    assert len(count) == calls * model.config.num_hidden_layers


def test_layers_of_one_method_share_the_readings_of_documents(monkeypatch):
    model, made = condense.apply(tiny.model("llama"), condense.CCA(group_size=4, window=6)), []
    original = condense.plan._read_documents
    monkeypatch.setattr(condense.plan, "_read_documents", lambda *args: made.append(1) or original(*args))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    model(tiny.tokens(1)[:, : sum(LENGTHS)], position_ids=positions, use_cache=False)
    assert len(made) == 1
