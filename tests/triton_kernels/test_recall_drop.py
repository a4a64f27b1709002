"""Recall that leaves groups out keeps no entries, and its kernels read none."""

import pytest
import torch

from condense import Recall
from condense.functional import extend
from condense.ops import Source, attend_recall
from condense.ops.recall import GroupIndex, IndexChoice, RecallSources

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.25
D = 64 if DEVICE == "cuda" else 16


@pytest.mark.parametrize("num_recall", [3, 0], ids=["some", "none"])
def test_a_prompt_is_what_it_is_with_any_entries(num_recall):
    method = Recall(group_size=4, window=5, num_recall=num_recall, unchosen="drop")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 45, D, generator=generator).to(DEVICE) for n in (4, 2, 2))
    context, _ = extend(method, None, q, k, v, scale=SCALE)
    assert context.entries.k.shape == (2, 2, 10, 0)
    codes, grid, store = context.extra
    tokens = Source(*store.split(D, dim=3))
    entries = Source(*(torch.randn(2, 2, 10, D, generator=generator).to(DEVICE) for _ in "kv"))
    choice = IndexChoice(q, GroupIndex(codes, grid), method.index_settings, SCALE, method.quota)
    sources = RecallSources(entries, tokens, context.window, context.spans)
    want, _ = attend_recall(q, sources, choice, scale=SCALE, unchosen="drop", backend="triton")
    assert torch.equal(method.attend(q, context, scale=SCALE, backend="triton")[0], want)
