"""What models got wrong once about packed documents, and what transformers asks of a filled cache."""

import pytest
import torch
from models import tiny

import condense

IDS = tiny.tokens(1, 40)
RESTARTING = torch.cat([torch.arange(25), torch.arange(15)])[None]
LONG = condense.CCA(window=1000)  # longer than the text: nothing is condensed


@pytest.mark.parametrize("layers", [None, [1]], ids=["all-layers", "one-layer"])
def test_positions_beside_a_mask_mark_no_documents(layers):
    """Defect 5: transformers looks at positions only where there is no attention mask."""
    model, mask = tiny.model("llama"), torch.ones_like(IDS)
    want = tiny.logits(model, IDS, attention_mask=mask, position_ids=RESTARTING)
    condense.apply(model, LONG, layers=layers)
    got = tiny.logits(model, IDS, attention_mask=mask, position_ids=RESTARTING)
    torch.testing.assert_close(got, want, **tiny.EXACT)


@pytest.mark.parametrize("change", ["numpy", "data"])
def test_positions_that_change_past_pytorch(change):
    """Defect 9: what is known of positions is what is in memory now."""
    model, positions = condense.apply(tiny.model("llama"), tiny.CCA), RESTARTING.clone()
    tiny.logits(model, IDS, position_ids=positions)
    other = torch.cat([torch.arange(10), torch.arange(30)])[None]
    if change == "numpy":
        positions.numpy()[:] = other.numpy()
    else:
        positions.data.copy_(other)
    want = tiny.logits(model, IDS, position_ids=other)
    torch.testing.assert_close(tiny.logits(model, IDS, position_ids=positions), want, **tiny.EXACT)


def test_a_filled_cache_is_initialized():
    """Defect 15: `DynamicCache.is_initialized` as of a stock model's cache."""
    model = tiny.model("llama")
    assert tiny.filled(model, IDS).is_initialized
    assert tiny.filled(condense.apply(model, tiny.CCA), IDS).is_initialized
