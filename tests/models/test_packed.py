"""Packed documents in a model: one call of attention per layer, however many documents there are."""

import pytest
import torch
from models import tiny

import condense
from condense.models import attention

LENGTHS = [23, 1, 30, 7]
IDS = tiny.tokens(1, 40)
RESTARTING = torch.cat([torch.arange(25), torch.arange(15)])[None]
LONG = condense.CCA(window=1000)  # longer than the text: nothing is condensed


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


@pytest.mark.parametrize("layers", [None, [1]], ids=["all-layers", "one-layer"])
def test_positions_beside_a_mask_mark_no_documents(layers):
    """Transformers looks at positions only where there is no attention mask."""
    model, mask = tiny.model("llama"), torch.ones_like(IDS)
    want = tiny.logits(model, IDS, attention_mask=mask, position_ids=RESTARTING)
    condense.apply(model, LONG, layers=layers)
    got = tiny.logits(model, IDS, attention_mask=mask, position_ids=RESTARTING)
    torch.testing.assert_close(got, want, **tiny.EXACT)


@pytest.mark.parametrize("change", ["numpy", "data"])
def test_positions_that_change_past_pytorch(change):
    """What is known of positions is what is in memory now."""
    model, positions = condense.apply(tiny.model("llama"), tiny.CCA), RESTARTING.clone()
    tiny.logits(model, IDS, position_ids=positions)
    other = torch.cat([torch.arange(10), torch.arange(30)])[None]
    if change == "numpy":
        positions.numpy()[:] = other.numpy()
    else:
        positions.data.copy_(other)
    want = tiny.logits(model, IDS, position_ids=other)
    torch.testing.assert_close(tiny.logits(model, IDS, position_ids=positions), want, **tiny.EXACT)
