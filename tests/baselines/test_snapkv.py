"""SnapKV against plain loops; in a model beside the sparse prefill that it is like.

Shapes: B rows, H query heads, K KV heads, L tokens.
"""

import pytest
import torch
from baselines.test_sparse_prefill import SCALE, SNAP, H, K, qkv
from layers import extend

import condense
from condense import SnapKV


def test_it_keeps_the_tokens_with_the_most_votes():
    L, (q, k, v) = 40, qkv(40)
    context, state = extend(SNAP, None, q, k, v, scale=SCALE)
    out, _ = SNAP.attend(q, context, scale=SCALE)
    torch.testing.assert_close(out, condense.attention(q, k, v, method=condense.Dense()))
    scores = SCALE * q[0] @ k[0].repeat_interleave(H // K, 0).mT
    weights = scores.masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf).softmax(-1)
    weights = weights[:, -SNAP.window :].sum(1).unflatten(0, (K, -1)).sum(1)
    for head in range(K):
        votes = [max(weights[head, max(0, i - 1) : min(i + 2, L - SNAP.window)]).item() for i in range(L - SNAP.window)]
        best = sorted(range(len(votes)), key=lambda i: (-votes[i], i))[: SNAP.budget - SNAP.window]
        kept = sorted([*best, *range(L - SNAP.window, L)])
        assert torch.equal(state.entries[0][0, head], k[0, head, kept])
        assert torch.equal(state.entries[1][0, head], v[0, head, kept])


def test_short_prompts_stay_whole_and_later_tokens_all_stay():
    q, k, v = qkv(60)
    _, state = extend(SNAP, None, q[:, :, :40], k[:, :, :40], v[:, :, :40], scale=SCALE)
    entries = state.entries
    for t in range(40, 60):
        new = [x[:, :, t : t + 1] for x in (q, k, v)]
        context, state = extend(SNAP, state, *new, scale=SCALE)
        out, _ = SNAP.attend(new[0], context, scale=SCALE)
        seen = ((kept, x[:, :, 40 : t + 1]) for kept, x in zip(entries, (k, v), strict=True))
        keys, values = (torch.cat(parts, 2).repeat_interleave(H // K, 1) for parts in seen)
        torch.testing.assert_close(out, (SCALE * new[0] @ keys.mT).softmax(-1) @ values)
    _, state = extend(SNAP, None, q[:, :, :12], k[:, :, :12], v[:, :, :12], scale=SCALE)
    assert torch.equal(state.entries[0], k[:, :, :12])


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"inference"):
        condense.attention(*(x.requires_grad_() for x in qkv(40)), method=SNAP)
    with pytest.raises(ValueError, match=r"latents"):
        SNAP.for_latents(16)
    for settings, message in (({"budget": 32}, "above window"), ({"kernel_size": 4}, "odd")):
        with pytest.raises(ValueError, match=message):
            SnapKV(**settings)
