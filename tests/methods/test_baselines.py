"""SnapKV, vertical-slash and FlexPrefill against plain loops, and in a model.

Shapes: B rows, H query heads, K KV heads, L tokens, D width.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from models import tiny
from torch.nn.attention.flex_attention import create_mask
from transformers import StaticCache

import condense
from condense.functional import extend
from condense.methods import FlexPrefill, SnapKV, VerticalSlash
from condense.methods.minference import _sum_of_diagonals
from condense.models.inspect import inspect
from condense.ops import BLOCK, seen_pairs, sparse_attention
from condense.ops.torch import blocks
from condense.plan import ForwardPlan

H, K, D = 4, 2, 8
SCALE = D**-0.5
SNAP = SnapKV(budget=12, window=4, kernel_size=3)
SPARSE = [
    VerticalSlash(vertical=5, slash=3),
    FlexPrefill(gamma=0.2, tau=0.0, min_budget=1),
    FlexPrefill(gamma=0.5, tau=1.0, min_budget=1),
]
NAMES = ["vertical-slash", "flex-lines", "flex-by-query"]


def qkv(L, seed=0, B=1, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, n, L, D, generator=generator, dtype=torch.float64) for n in (H, K, K))
    return spread * q, k, v


def dense_weights(q, k):
    """``[H, L, L]`` of one row."""
    L = q.shape[2]
    scores = SCALE * q[0] @ k[0].repeat_interleave(H // K, 0).mT
    return scores.masked_fill(torch.ones(L, L).triu(1).bool(), -math.inf).softmax(-1)


def masked_attention(q, k, v, seen):
    """Attention of one row where seen bool ``[H, L, L]``."""
    scores = SCALE * q[0] @ k[0].repeat_interleave(H // K, 0).mT
    return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[0].repeat_interleave(H // K, 0))[None]


@pytest.mark.parametrize("seed", range(4))
def test_snapkv_keeps_the_tokens_with_the_most_votes(seed):
    L = 40
    q, k, v = qkv(L, seed)
    context, state = extend(SNAP, None, q, k, v, scale=SCALE)
    out, _ = SNAP.attend(q, context, scale=SCALE)
    torch.testing.assert_close(out, condense.attention(q, k, v, method=condense.Dense()))
    weights = dense_weights(q, k)[:, -SNAP.window :].sum(1).unflatten(0, (K, -1)).sum(1)
    for head in range(K):
        votes = [max(weights[head, max(0, i - 1) : min(i + 2, L - SNAP.window)]).item() for i in range(L - SNAP.window)]
        best = sorted(range(len(votes)), key=lambda i: (-votes[i], i))[: SNAP.budget - SNAP.window]
        kept = sorted([*best, *range(L - SNAP.window, L)])
        assert torch.equal(state.entries[0][0, head], k[0, head, kept])
        assert torch.equal(state.entries[1][0, head], v[0, head, kept])


def test_snapkv_leaves_short_prompts_whole_and_keeps_later_tokens():
    q, k, v = qkv(60)
    _, state = extend(SNAP, None, q[:, :, :40], k[:, :, :40], v[:, :, :40], scale=SCALE)
    entries = state.entries
    for t in range(40, 60):
        new = [x[:, :, t : t + 1] for x in (q, k, v)]
        context, state = extend(SNAP, state, *new, scale=SCALE)
        out, _ = SNAP.attend(new[0], context, scale=SCALE)
        keys, values = (
            torch.cat([kept, x[:, :, 40 : t + 1]], 2).repeat_interleave(H // K, 1)
            for kept, x in zip(entries, (k, v), strict=True)
        )
        expected = (SCALE * new[0] @ keys.mT).softmax(-1) @ values
        torch.testing.assert_close(out, expected)
    _, state = extend(SNAP, None, q[:, :, :12], k[:, :, :12], v[:, :, :12], scale=SCALE)
    assert torch.equal(state.entries[0], k[:, :, :12])


def seen_by_loops(method, q, k):
    """What `VerticalSlash` and `FlexPrefill` let each query see, bool ``[H, L, L]``, written as the papers say it."""
    L = q.shape[2]
    N = -(-L // BLOCK)
    weights = dense_weights(q, k)
    block = torch.arange(L) // BLOCK
    seen = torch.zeros(H, L, L, dtype=torch.bool)
    for h in range(H):
        if isinstance(method, VerticalSlash):
            last = weights[h, -64:]
            columns = last.sum(0)
            distances = torch.tensor(
                [sum(last[r, L - 64 + r - o].item() for r in range(64) if L - 64 + r >= o) for o in range(L)]
            )
            columns[:30], distances[:100] = math.inf, math.inf
            seen[h, :, columns.argsort(descending=True, stable=True)[: method.vertical]] = True
            for o in [*distances.argsort(descending=True, stable=True)[: method.slash].tolist(), 0]:
                for t in range(o, L):
                    i, j = t // BLOCK, (t - o) // BLOCK
                    seen[h, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] = True
                if -(-o // BLOCK) < N:
                    seen[h] |= block[:, None] - block == -(-o // BLOCK)
        else:
            seen[h] = _flex_prefill(method, q[0, h], k[0, h // (H // K)], weights[h], block, N)
    return seen & torch.ones(L, L).tril().bool()


def _flex_prefill(method, q, k, weights, block, N):
    L = len(q)
    mean = torch.stack([k[block == j].mean(0) for j in range(N)])
    last = weights[-BLOCK:].mean(0)
    true = torch.stack([last[block == j].sum() for j in range(N)])
    chosen = torch.eye(N, dtype=torch.bool)
    chosen[:, 0] = True
    if method.tau > 0:
        queries = torch.stack([q[block == i].mean(0) for i in range(N)])
        scores = torch.stack(
            [torch.cat([(SCALE * queries[i] @ mean[: i + 1].T).softmax(-1), torch.zeros(N - i - 1)]) for i in range(N)]
        )
        total, picked = 0.0, scores.flatten().argsort(descending=True, stable=True).tolist()
        for place in picked:
            if total >= method.gamma:
                break
            chosen[place // N, place % N] = True
            total += scores.flatten()[place].item() / N
        for i in range(N):
            chosen[i, scores[i].argmax()] = True
    else:
        slash = torch.zeros(N)
        for t in range(L - BLOCK, L):
            for j in range(block[t] + 1):
                slash[block[t] - j] += weights[t, block == j].sum() / BLOCK
        for sums, mark in ((true, "column"), (slash, "diagonal")):
            total = 0.0
            for place in sums.argsort(descending=True, stable=True).tolist():
                if total >= method.gamma:
                    break
                total += sums[place].item()
                for i in range(N):
                    if mark == "column":
                        chosen[i, place] = True
                    elif i >= place:
                        chosen[i, i - place] = True
    return chosen[block][:, block]


@pytest.mark.parametrize("method", SPARSE, ids=NAMES)
@pytest.mark.parametrize("L", [5 * BLOCK, 3 * BLOCK + 37])
def test_sparse_prompts_see_what_plain_loops_choose(method, L):
    q, k, v = qkv(L, seed=1)
    seen = seen_by_loops(method, q, k)
    assert 0.2 < seen.double().mean() / 0.5 < 0.97, "some pairs are left out, and not nearly all"
    out, lse = condense.attention(q, k, v, method=method, return_lse=True)
    torch.testing.assert_close(out, masked_attention(q, k, v, seen))
    scores = (SCALE * q[0] @ k[0].repeat_interleave(H // K, 0).mT).masked_fill(~seen, -math.inf)
    torch.testing.assert_close(lse[0], scores.logsumexp(-1))


def compiled_flex(q, k, v, block_mask, scale, return_aux):
    """What FlexAttention's kernel computes: partial blocks under the mask, full ones without, all others left out."""
    H, N, M = q.shape[1], -(-q.shape[2] // BLOCK), -(-k.shape[2] // BLOCK)

    def listed(counts, order):
        chosen = torch.zeros(H, N, M, dtype=torch.bool)
        for h, i in itertools.product(range(H), range(N)) if counts is not None else ():
            chosen[h, i, order[0, h, i, : counts[0, h, i]].long()] = True
        return chosen.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, : q.shape[2], : k.shape[2]]

    partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    masked = create_mask(block_mask.mask_mod, 1, H, q.shape[2], k.shape[2], device="cpu")[0]
    scores = (scale * q[0] @ k[0].mT).masked_fill(~(partial & masked | full), -math.inf)
    assert return_aux.lse
    return (scores.softmax(-1).nan_to_num() @ v[0])[None], SimpleNamespace(lse=scores.logsumexp(-1)[None])


@pytest.mark.parametrize("method", [*SPARSE, VerticalSlash(vertical=200, slash=3)], ids=[*NAMES, "many-columns"])
@pytest.mark.parametrize("L", [3 * BLOCK, 9 * BLOCK + 37])
def test_the_lists_for_flex_attention_give_the_definition(method, L, monkeypatch):
    monkeypatch.setattr(blocks, "_flex", lambda: compiled_flex)
    q, k, v = (x.float() for x in qkv(L, seed=3))
    keys = method.choose(q, k, scale=SCALE)
    k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
    for got, want in zip(
        blocks._by_flex(q, k, v, keys, SCALE), sparse_attention(q, k, v, keys, scale=SCALE), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("method", SPARSE, ids=NAMES)
def test_pairs_are_counted_in_whole_blocks(method):
    L = 3 * BLOCK + 37
    q, k, _ = qkv(L, seed=1)
    keys = method.choose(q, k, scale=SCALE)
    block = torch.arange(L) // BLOCK
    computed = keys.blocks[:, block][:, :, block]
    for h, columns in enumerate(keys.columns):
        for column in columns:
            computed[h, block >= block[column], column] = True
    assert seen_pairs(keys, L).tolist() == (computed & (block[:, None] >= block)).sum((1, 2)).tolist()


def test_diagonals_are_summed_by_distance():
    weights = torch.arange(24.0).reshape(1, 3, 8).double()
    sums = _sum_of_diagonals(weights)[0]
    for distance in range(8):
        expected = sum(weights[0, r, 5 + r - distance].item() for r in range(3) if 0 <= 5 + r - distance < 8)
        assert sums[distance] == expected


@pytest.mark.parametrize("method", [*SPARSE, SNAP], ids=[*NAMES, "snapkv"])
def test_padded_rows_equal_single_rows(method):
    L, tokens = 2 * BLOCK + 60, (2 * BLOCK + 60, BLOCK + 31)
    q, k, v = qkv(L, seed=2, B=2)
    padding = torch.tensor([L - n for n in tokens])
    out = condense.attention(q, k, v, method=method, padding=padding)
    plan = ForwardPlan(L, torch.tensor(tokens))
    _, state = extend(method, None, q, k, v, scale=SCALE, plan=plan)
    for row, n in enumerate(tokens):
        alone = [x[row : row + 1, :, L - n :] for x in (q, k, v)]
        torch.testing.assert_close(out[row, :, L - n :], condense.attention(*alone, method=method)[0])
        _, own = extend(method, None, *alone, scale=SCALE)
        count = own.entries[0].shape[2]
        assert torch.equal(state.entries[0][row, :, :count], own.entries[0][0])


@pytest.mark.parametrize("method", [*SPARSE, SNAP], ids=[*NAMES, "snapkv"])
def test_a_row_of_padding_alone_gives_0(method):
    q, k, v = qkv(40, B=2)
    out = condense.attention(q, k, v, method=method, padding=torch.tensor([40, 0]))
    assert bool((out[0] == 0).all())
    torch.testing.assert_close(out[1:], condense.attention(q[1:], k[1:], v[1:], method=method))


@pytest.mark.parametrize("method", [*SPARSE, SNAP], ids=[*NAMES, "snapkv"])
@torch.no_grad()
def test_a_model_decodes_over_what_was_kept_in_growing_and_static_caches(method):
    model, ids = tiny.model("llama"), tiny.tokens(1, 40)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with condense.use(model, method):
        growing = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        static = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=StaticCache(model.config, max_cache_len=64),
            **settings,
        )
    assert torch.equal(growing, static)
    if method is not SNAP:
        dense = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert torch.equal(growing, dense), "a prompt of one block is read densely"


@pytest.mark.parametrize("method", [SPARSE[0], SNAP], ids=["vertical-slash", "snapkv"])
@torch.no_grad()
def test_inspect_counts_what_a_cache_allocates(method):
    model, ids = tiny.model("llama"), tiny.tokens(1, 40)
    reports = inspect(model, method, 40, itemsize=8)
    with condense.use(model, method):
        cache = model(ids, use_cache=True).past_key_values
    assert sum(report.bytes for report in reports) == condense.cache_nbytes(cache)
    assert {report.entries for report in reports} == {SNAP.budget if method is SNAP else 40}


@pytest.mark.parametrize("method", [*SPARSE, SNAP], ids=[*NAMES, "snapkv"])
def test_training_is_refused(method):
    q, k, v = (x.requires_grad_() for x in qkv(40))
    with pytest.raises(ValueError, match=r"inference"):
        condense.attention(q, k, v, method=method)


def test_snapkv_refuses_latents():
    with pytest.raises(ValueError, match=r"latents"):
        SNAP.for_latents(16)


@pytest.mark.parametrize("method", SPARSE, ids=NAMES)
def test_backends_without_kernels_for_its_prompts_are_refused(method):
    q, k, v = qkv(40)
    context, _ = extend(method, None, q, k, v, scale=SCALE)
    with pytest.raises(ValueError, match=r"backend 'triton' has no kernels for prompts of .*; use backend='auto'"):
        method.attend(q, context, scale=SCALE, backend="triton")


def test_settings_are_checked():
    for make, message in (
        (lambda: SnapKV(budget=32), "above window"),
        (lambda: SnapKV(kernel_size=4), "odd"),
        (lambda: FlexPrefill(gamma=1.5), "gamma"),
        (lambda: VerticalSlash(vertical=-1), "vertical"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
