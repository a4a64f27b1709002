"""Sparse prefill, in all its patterns, and SnapKV, which is like it, against plain loops, and in models."""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from analyze.patterns import seen_pairs
from layers import extend
from models import tiny
from oracles import latent_oracle, oracle
from torch.nn.attention.flex_attention import create_mask

import condense
from condense import AShape, BlockSparse, FlexPrefill, MInference, SnapKV, VerticalSlash
from condense.baselines import blocks
from condense.baselines.blocks import BLOCK, sparse_attention
from condense.models.inspect import inspect
from condense.plan import ForwardPlan

H, K, D = 4, 2, 8
SCALE = D**-0.5
PATTERNS = (
    "a_shape:sink=60,window=150", "block_sparse:blocks=2", "vertical_slash:vertical=40,slash=110",
    "a_shape:sink=1,window=1",
)  # fmt: skip
LINES = VerticalSlash(vertical=5, slash=3)
FLEX = {"lines": FlexPrefill(gamma=0.2, tau=0.0, min_budget=1), "tau": FlexPrefill(gamma=0.5, tau=1.0, min_budget=1)}
FIXED = {"a-shape": AShape(sink=60, window=100), "a-129": AShape(sink=129, window=1), "blocks": BlockSparse(blocks=2)}
ALL = {"vertical-slash": LINES, **FLEX, "minference": MInference(patterns=PATTERNS)}
SNAP = SnapKV(budget=12, window=4, kernel_size=3)


def of(methods):
    return pytest.mark.parametrize("method", methods.values(), ids=methods)


def qkv(L, seed=0, B=1):
    q, k, v = oracle.random_qkv(B, H, K, L, D, D, seed=seed)
    return 3 * q, k, v


def scores_of(q, k):
    return SCALE * q[0] @ k[0].repeat_interleave(H // K, 0).mT


def seen_by_loops(method, q, k):
    """The tokens that a method lets each query see, bool ``[H, L, L]``, written as its paper says it."""
    L = q.shape[2]
    block, past = torch.arange(L) // BLOCK, torch.ones(L, L).tril().bool()
    weights = scores_of(q, k).masked_fill(~past, -math.inf).softmax(-1)
    seen = [_of_head(method, q[0, h], k[0, h // (H // K)], weights[h], block) for h in range(H)]
    return torch.stack([x if x.shape[0] == L else x[block][:, block] for x in seen]) & past


def _of_head(method, q, k, weights, block):
    L, N = len(q), -(-len(q) // BLOCK)
    if isinstance(method, VerticalSlash):
        return _lines(method, weights, L, N, block)
    if isinstance(method, FlexPrefill):
        return _flex_prefill(method, q, k, weights, block, N)
    tokens = [range(j * BLOCK, min(L, (j + 1) * BLOCK)) for j in range(N)]
    chosen = torch.eye(N, dtype=torch.bool)
    for i in range(N):
        if isinstance(method, AShape):
            best = [j for j in range(i) if tokens[i][0] - tokens[j][-1] < method.window or tokens[j][0] < method.sink]
        else:
            scores = [float(q[tokens[i]].mean(0) @ k[tokens[j]].mean(0)) for j in range(i + 1)]
            best = sorted(range(i + 1), key=lambda j: -scores[j])[: method.blocks]
        chosen[i, best] = True
    return chosen


def _lines(method, weights, L, N, block):
    seen, last, columns = torch.zeros(L, L, dtype=torch.bool), weights[-64:], weights[-64:].sum(0)
    distances = torch.tensor([sum(last[r, L - 64 + r - o] for r in range(64) if L - 64 + r >= o) for o in range(L)])
    columns[:30], distances[:100] = math.inf, math.inf
    seen[:, columns.argsort(descending=True, stable=True)[: method.vertical]] = True
    for o in [*distances.argsort(descending=True, stable=True)[: method.slash].tolist(), 0]:
        for t in range(o, L):
            i, j = t // BLOCK, (t - o) // BLOCK
            seen[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] = True
        if -(-o // BLOCK) < N:
            seen |= block[:, None] - block == -(-o // BLOCK)
    return seen


def _flex_prefill(method, q, k, weights, block, N):
    L = len(q)
    mean, last = torch.stack([k[block == j].mean(0) for j in range(N)]), weights[-BLOCK:].mean(0)
    true, chosen = torch.stack([last[block == j].sum() for j in range(N)]), torch.eye(N, dtype=torch.bool)
    chosen[:, 0] = True
    if method.tau > 0:
        queries = torch.stack([q[block == i].mean(0) for i in range(N)])
        scores = (SCALE * queries @ mean.T).masked_fill(~torch.ones(N, N).tril().bool(), -math.inf).softmax(-1)
        for place in best_until(method.gamma, scores.flatten() / N):
            chosen[place // N, place % N] = True
        return chosen.scatter(1, scores.argmax(1, keepdim=True), True)
    slash = torch.zeros(N)
    for t in range(L - BLOCK, L):
        for j in range(block[t] + 1):
            slash[block[t] - j] += weights[t, block == j].sum() / BLOCK
    chosen[:, best_until(method.gamma, true)] = True
    for distance in best_until(method.gamma, slash):
        for i in range(distance, N):
            chosen[i, i - distance] = True
    return chosen


def best_until(gamma, sums):
    """Places of the largest numbers, until their sum reaches ``gamma``."""
    places, total = [], 0.0
    for place in sums.argsort(descending=True, stable=True).tolist():
        if total < gamma:
            places.append(place)
            total += sums[place].item()
    return places


@of({"vertical-slash": LINES, **FLEX, **FIXED})
@pytest.mark.parametrize("L", [5 * BLOCK, 3 * BLOCK + 37])
def test_prompts_see_what_plain_loops_choose(method, L):
    q, k, v = qkv(L, seed=1)
    seen = seen_by_loops(method, q, k)
    assert 0.2 < seen.double().mean() / 0.5 < 0.97, "some pairs are left out, and not nearly all"
    out, lse = condense.attention(q, k, v, method=method, return_lse=True)
    scores = scores_of(q, k).masked_fill(~seen, -math.inf)
    torch.testing.assert_close(out[0], scores.softmax(-1) @ v[0].repeat_interleave(H // K, 0))
    torch.testing.assert_close(lse[0], scores.logsumexp(-1))


def test_each_head_has_its_pattern():
    q, k, v = qkv(4 * BLOCK + 37)
    out = condense.attention(q, k, v, method=MInference(patterns=PATTERNS))
    for head, text in enumerate(PATTERNS):
        torch.testing.assert_close(out[:, head], condense.attention(q, k, v, method=text)[:, head])
    one = condense.attention(q, k, v, method=MInference(patterns=PATTERNS[1:2]))
    torch.testing.assert_close(one, condense.attention(q, k, v, method=BlockSparse(blocks=2)))


def test_patterns_are_saved_and_checked():
    method = MInference(patterns=PATTERNS)
    again = condense.Method.parse(json.loads(json.dumps(method.to_dict())))
    assert (again, hash(again)) == (method, hash(method))
    assert condense.Method.parse("minference:patterns=a_shape") == MInference(patterns=("a_shape",))
    way, kinds = "benchmarks/analyze patterns", "a_shape, vertical_slash or block_sparse"
    wrong = {(): way, 3: way, ("cca",): kinds, (AShape(),): kinds, ("block_sparse:blocks=0",): "blocks"}
    for patterns, message in wrong.items():
        tiny.refused(message, MInference, patterns=patterns)
    three = MInference(patterns=PATTERNS[:3])
    tiny.refused("one for each of 4 query heads, got 3", condense.attention, *qkv(40), method=three)


def compiled_flex(q, k, v, block_mask, scale, return_aux):
    """Attention as in FlexAttention's kernel: partial blocks under the mask, full ones without, all others left out."""
    N, M = -(-q.shape[2] // BLOCK), -(-k.shape[2] // BLOCK)

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


@of({"vertical-slash": LINES, **FLEX, "many-columns": VerticalSlash(vertical=200, slash=3)})
@pytest.mark.parametrize("L", [3 * BLOCK, 9 * BLOCK + 37])
def test_the_lists_for_flex_attention_give_the_definition(method, L, monkeypatch):
    monkeypatch.setattr(blocks, "_flex", lambda: compiled_flex)
    q, k, v = (x.float() for x in qkv(L, seed=3))
    keys = method.choose(q, k, scale=SCALE)
    k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
    want = sparse_attention(q, k, v, keys, scale=SCALE)
    torch.testing.assert_close(blocks._by_flex(q, k, v, keys, SCALE), want)


@of({"vertical-slash": LINES, **FLEX})
def test_pairs_are_counted_in_whole_blocks(method):
    L = 3 * BLOCK + 37
    block, keys = torch.arange(L) // BLOCK, method.choose(*qkv(L, seed=1)[:2], scale=SCALE)
    computed = keys.blocks[:, block][:, :, block]
    for h, columns in enumerate(keys.columns):
        for column in columns:
            computed[h, block >= block[column], column] = True
    assert seen_pairs(keys, L).tolist() == (computed & (block[:, None] >= block)).sum((1, 2)).tolist()


@of(ALL | {"snapkv": SNAP})
def test_padded_rows_equal_single_rows(method):
    L, tokens = 2 * BLOCK + 60, (2 * BLOCK + 60, BLOCK + 31, 7, 0)
    q, k, v = qkv(L, seed=2, B=4)
    out = condense.attention(q, k, v, method=method, padding=torch.tensor([L - n for n in tokens]))
    _, state = extend(method, None, q, k, v, scale=SCALE, plan=ForwardPlan(L, torch.tensor(tokens)))
    kept = [min(n, method.budget) if method is SNAP else n for n in tokens]
    assert state.first.num.tolist() == kept
    assert bool((out[3] == 0).all())
    for row, n in enumerate(tokens[:3]):
        alone = [x[row : row + 1, :, L - n :] for x in (q, k, v)]
        torch.testing.assert_close(out[row, :, L - n :], condense.attention(*alone, method=method)[0])
        _, own = extend(method, None, *alone, scale=SCALE)
        assert torch.equal(state.entries[0][row, :, : kept[row]], own.entries[0][0])
        assert method is SNAP or torch.equal(own.entries[0], alone[1])


@torch.no_grad()
def test_a_model_decodes_over_what_was_kept_in_growing_and_static_caches():
    """A prompt of one block is read densely, and all of its tokens are kept but by SnapKV."""
    model, ids = tiny.model("llama"), tiny.tokens(1, 40)
    dense = tiny.generate(model, ids)
    for method in (*ALL.values(), SNAP):
        with condense.use(model, method):
            growing, static = (tiny.generate(model, ids, cache_implementation=kind) for kind in ("dynamic", "static"))
            cache = model(ids, use_cache=True).past_key_values
        assert torch.equal(growing, static)
        assert torch.equal(growing, dense) is (method is not SNAP)
        reports = inspect(model, method, 40, itemsize=8)
        assert sum(report.bytes for report in reports) == condense.cache_nbytes(cache)
        assert {report.entries for report in reports} == {SNAP.budget if method is SNAP else 40}


@of(ALL)
def test_training_and_backends_without_kernels_are_refused(method):
    q, k, v = qkv(40)
    context, _ = extend(method, None, q, k, v, scale=SCALE)
    said = "backend 'triton' has no kernels for prompts of .*; use backend='auto'"
    tiny.refused(said, method.attend, q, context, scale=SCALE, backend="triton")
    for each in (method, SNAP):
        tiny.refused(r"inference", condense.attention, *(x.requires_grad_() for x in (q, k, v)), method=each)
    tiny.refused(r"latents", SNAP.for_latents, 16)


@of(ALL)
def test_latents_are_read_by_the_keys_that_they_expand_to(method):
    q_nope, q_rope, c, k_rope, w_uk, w_uv = latent_oracle.random(1, H, 4 * BLOCK + 37, (6, 4, 12, 5), seed=1)
    out = condense.latent_attention(3 * q_nope, 3 * q_rope, c, k_rope, w_uk, w_uv, method=method)
    q, v = 3 * torch.cat([q_nope, q_rope], -1), c[:, None] @ w_uv
    k = torch.cat([c[:, None] @ w_uk, k_rope[:, None].expand(-1, H, -1, -1)], -1)
    want, dense = (condense.attention(q, k, v, method=x) for x in (method, condense.Dense()))
    assert (want - dense).abs().max() > 0.1
    torch.testing.assert_close(out, want)


@torch.no_grad()
def test_an_mla_model_reads_its_prompt_sparsely_and_decodes_densely():
    model, ids = tiny.model("deepseek_v3"), tiny.tokens(2, 5 * BLOCK + 30)
    mask = torch.ones_like(ids)
    mask[1, :140] = 0
    stock = tiny.generate(model, ids, attention_mask=mask)
    with condense.use(model, FlexPrefill(gamma=1.0)):
        assert torch.equal(tiny.generate(model, ids, attention_mask=mask), stock), "it sees everything"
    dense = model(ids).logits
    with condense.use(model, FlexPrefill(gamma=0.1, tau=0.0, min_budget=1)):
        output = model(ids, use_cache=True)
    assert (output.logits[:, -1] - dense[:, -1]).abs().max() > 1e-3
    with condense.use(model, "dense"):
        kept = model(ids, use_cache=True).past_key_values
    assert condense.cache_nbytes(output.past_key_values) == condense.cache_nbytes(kept)


def test_snapkv_keeps_the_tokens_with_the_most_votes():
    L, (q, k, v) = 40, qkv(40)
    context, state = extend(SNAP, None, q, k, v, scale=SCALE)
    out, _ = SNAP.attend(q, context, scale=SCALE)
    torch.testing.assert_close(out, condense.attention(q, k, v, method=condense.Dense()))
    weights = scores_of(q, k).masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf).softmax(-1)
    weights = weights[:, -SNAP.window :].sum(1).unflatten(0, (K, -1)).sum(1)
    for head in range(K):
        votes = [max(weights[head, max(0, i - 1) : min(i + 2, L - SNAP.window)]).item() for i in range(L - SNAP.window)]
        best = sorted(range(len(votes)), key=lambda i: (-votes[i], i))[: SNAP.budget - SNAP.window]
        kept = sorted([*best, *range(L - SNAP.window, L)])
        assert torch.equal(state.entries[0][0, head], k[0, head, kept])
        assert torch.equal(state.entries[1][0, head], v[0, head, kept])


def test_short_prompts_of_snapkv_stay_whole_and_later_tokens_all_stay():
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
