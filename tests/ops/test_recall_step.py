"""Recall's decode step over buffers at fixed addresses, against the whole prompt read at once.

Shapes: B rows, H query heads, K KV heads, L tokens, D and Dv widths, G groups of g tokens, W ring slots.
"""

import math

import pytest
import torch
from ops.test_recall import DV, EXACT, SCALE, B, D, quota_of, recall, tensors

from condense.ops.recall import (
    EntrySettings,
    IndexSettings,
    Quota,
    RecallSettings,
    RecallState,
    choose_groups,
    index_scores,
)
from condense.ops.recall import recall_step as dispatched_step
from condense.ops.spans import UniformRule
from condense.ops.torch.recall_step import recall_step
from condense.ops.types import NewToken

# group size, window, index, index_size, index_bits, num_recall
CASES = {
    "bounds-16": (4, 5, "bounds", 2, 16, 2),
    "bounds-8": (4, 9, "bounds", 2, 8, 3),
    "bounds-4": (4, 3, "bounds", 4, 4, 2),
    "sub_means-8": (6, 5, "sub_means", 2, 8, 2),
    "window-0": (4, 0, "bounds", 2, 8, 2),
    "g-1": (1, 3, "sub_means", 1, 16, 5),
    "none-open": (4, 5, "bounds", 2, 8, 0),
    "all-open": (4, 5, "bounds", 2, 8, 99),
    "a-third": (4, 5, "bounds", 2, 8, Quota(part=1, of=3)),
}


def settings_of(case, unchosen="pool"):
    g, w, kind, size, bits, r = case
    index, entries = IndexSettings(kind, g, size, bits), EntrySettings(bias=math.log(g))
    return RecallSettings(UniformRule(g, w), index, quota_of(r), entries, unchosen == "pool")


def new_token(qkv, t, real=None):
    """Token t of every row; real bool ``[B, L]``."""
    return NewToken(*(x[:, :, t : t + 1] for x in qkv), None if real is None else real[:, t].to(qkv[0].device))


def empty_state(
    settings, length, K, *, rows=B, widths=(D, DV), dtype=torch.float64, groups=None, slots=0, device="cpu"
):
    """Buffers for ``length`` tokens."""
    g, width = settings.rule.chunk, widths[0]
    G = settings.rule.closed(length) if groups is None else groups
    W = min(settings.rule.window + g, length)
    num_codes, num_grid = settings.index.widths(width)
    wide, form = torch.promote_types(dtype, torch.float32), settings.store_format
    C, stored = form.width(*widths, dtype.itemsize), form.dtype(dtype)
    codes = dtype if settings.index.bits == 16 else torch.uint8
    entries = settings.entries.format
    of_entries = [entries.width(x, dtype.itemsize) if settings.pool else 0 for x in widths]
    return RecallState(
        *(torch.zeros(rows, K, G, x, dtype=entries.dtype(dtype), device=device) for x in of_entries),
        torch.zeros(rows, K, G, num_codes, dtype=codes, device=device),
        torch.zeros(rows, K, G, num_grid, dtype=wide, device=device),
        torch.zeros(rows, K, G * g, C, dtype=stored, device=device),
        *(torch.zeros(rows, K, W, x, dtype=dtype, device=device) for x in widths),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.zeros(rows, K, slots * g, C, dtype=stored, device=device),
        torch.full((rows, K, slots), -1, dtype=torch.int32, device=device),
        torch.arange(slots, dtype=torch.int32, device=device).repeat(rows, K, 1),
        torch.zeros(rows, K, settings.entries.num_summary, width, dtype=dtype, device=device),
        torch.zeros(rows, K, *((G, 1) if settings.entries.matched else (0, 0)), dtype=wide, device=device),
    )


@pytest.mark.parametrize("unchosen", ["pool", "drop"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_many_steps_equal_the_whole(case, unchosen):
    check_steps(case, unchosen, 100)


@pytest.mark.slow
def test_300_steps_equal_the_whole():
    check_steps(CASES["bounds-8"], "pool", 300)


def check_steps(case, unchosen, L):
    qkv, (g, w, *_) = tensors(4, 2, L), case
    settings = settings_of(case, unchosen)
    want = recall(*qkv, g=g, w=w, r=settings.quota, settings=settings.index, unchosen=unchosen)
    state = empty_state(settings, L, 2)
    addresses = [x.data_ptr() for x in state]
    out = [recall_step(new_token(qkv, t), state, settings, scale=SCALE) for t in range(L)]
    torch.testing.assert_close(torch.cat(out, dim=2), want, **EXACT)
    assert state.seen.tolist() == [L] * B
    assert [x.data_ptr() for x in state] == addresses


@pytest.mark.parametrize("integer", [False, True], ids=["bool", "int"])
def test_rows_that_are_not_real(integer):
    """Rows pause at random, with NaN in what they are given: they change nothing and get 0."""
    case, L = CASES["bounds-8"], 120
    settings = settings_of(case)
    real = torch.rand(3, L, generator=torch.Generator().manual_seed(5)) < torch.tensor([0.9, 0.5, 0.0])[:, None]
    qkv = tensors(6, 2, L, rows=3)
    state, outs = empty_state(settings, L, 2, rows=3), []
    for t in range(L):
        dead = ~real[:, t]
        new = [x.masked_fill(dead[:, None, None, None], torch.nan) for x in new_token(qkv, t)[:3]]
        before = [x[dead].clone() for x in state]
        token = NewToken(*new, real[:, t].int() if integer else real[:, t])
        outs.append(recall_step(token, state, settings, scale=SCALE))
        assert all(torch.equal(x[dead], y) for x, y in zip(state, before, strict=True))
        assert not outs[-1][dead].any()
    out = torch.cat(outs, dim=2)
    for row in range(2):
        mine = [x[row : row + 1][:, :, real[row]] for x in (*qkv, out)]
        want = recall(*mine[:3], g=case[0], w=case[1], r=settings.quota, settings=settings.index)
        torch.testing.assert_close(mine[3], want, **EXACT)


def test_groups_beyond_the_capacity_are_never_seen():
    settings = settings_of(CASES["bounds-16"])
    qkv = tensors(2, 1, 60)
    state = empty_state(settings, 60, 1, groups=3)
    before = None
    for t in range(60):
        out = recall_step(new_token(qkv, t), state, settings, scale=SCALE)
        if t == 20:
            before = [x.clone() for x in (state.entries_k, state.codes, state.store)]
    assert all(torch.equal(x, y) for x, y in zip(before, (state.entries_k, state.codes, state.store), strict=True))
    assert bool(out.isfinite().all())


def test_latents():
    """Values are the first columns of the keys, one KV head for all query heads."""
    q, k, _ = tensors(4, 1, 80)
    settings = settings_of(CASES["bounds-8"])
    want = recall(q, k, k[..., :4], g=4, w=9, r=settings.quota, settings=settings.index)
    state, none = empty_state(settings, 80, 1, widths=(D, 0)), k[..., :0]
    out = [recall_step(new_token((q, k, none), t), state, settings, scale=SCALE, latent=4) for t in range(80)]
    torch.testing.assert_close(torch.cat(out, dim=2), want, **EXACT)


def test_one_graph():
    """Traced as one graph, which is not made again while groups close."""
    settings = settings_of(CASES["bounds-8"])
    qkv, traces = tensors(4, 2, 40, dtype=torch.float32), []

    def backend(graph, inputs):
        traces.append(graph)
        return graph.forward

    compiled = torch.compile(recall_step, backend=backend, fullgraph=True)
    states = [empty_state(settings, 40, 2, dtype=torch.float32) for _ in range(2)]
    for t in range(40):
        new = new_token(qkv, t)
        out, want = (f(new, s, settings, scale=SCALE) for f, s in zip((compiled, recall_step), states, strict=True))
        assert torch.equal(out, want)
    assert len(traces) == 1


def test_backends_of_a_step():
    settings = settings_of(CASES["bounds-8"])
    new = new_token(tensors(4, 2, 40), 0)
    want = recall_step(new, empty_state(settings, 40, 2), settings, scale=SCALE)
    assert torch.equal(dispatched_step(new, empty_state(settings, 40, 2), settings, scale=SCALE), want)
    with pytest.raises(ValueError, match="backend must be"):
        dispatched_step(new, empty_state(settings, 40, 2), settings, scale=SCALE, backend="reference")
    with pytest.raises(ValueError, match="backend 'triton'"):  # no CUDA, or float64
        dispatched_step(new, empty_state(settings, 40, 2), settings, scale=SCALE, backend="triton")


@pytest.mark.parametrize("name", ["bounds-8", "sub_means-8", "g-1", "none-open", "all-open"])
def test_slots_change_no_bit(name):
    """None, fewer than groups that open, some more, more than there are groups; a row pauses."""
    settings = settings_of(CASES[name])
    qkv, real = tensors(4, 2, 60), torch.rand(B, 60, generator=torch.Generator().manual_seed(2)) < 0.9
    states = [empty_state(settings, 60, 2, slots=n) for n in (0, 1, 3, 5, 80)]
    for t in range(60):
        outs = [recall_step(new_token(qkv, t, real), state, settings, scale=SCALE) for state in states]
        for out, state in zip(outs, states, strict=True):
            assert torch.equal(out, outs[0])
            check_slots(state, settings.rule.chunk)
    assert name == "none-open" or int((states[-1].held >= 0).sum(-1).min()) > 5


def check_slots(state, g):
    """Every slot holds the tokens of its group, no two the same group, and each slot stands once in the order."""
    for held, order, slots, store in zip(
        *(x.flatten(0, 1) for x in (state.held, state.order, state.slots, state.store)), strict=True
    ):
        assert order.sort().values.tolist() == list(range(len(order)))
        groups = held[held >= 0].tolist()
        assert len(set(groups)) == len(groups)
        for slot, group in enumerate(held.tolist()):
            if group >= 0:
                assert torch.equal(slots[slot * g : (slot + 1) * g], store[group * g : (group + 1) * g])


def test_the_group_that_was_open_the_longest_ago_loses_its_slot():
    """Against a plain list: hits move to the end in their old order, then those that come."""
    settings = settings_of(CASES["g-1"])
    qkv = tensors(2, 1, 60)
    state = empty_state(settings, 60, 1, slots=7)
    held = [[(slot, -1) for slot in range(7)] for _ in range(B)]
    for t in range(60):
        chosen = []
        before = state._replace(held=state.held.clone(), order=state.order.clone())
        recall_step(new_token(qkv, t), state, settings, scale=SCALE)
        scores = index_scores(qkv[0][:, :, t : t + 1], before.group_index, settings.index, SCALE)
        closed = settings.rule.closed(state.seen)
        chosen = choose_groups(scores, closed[:, None, None], settings.quota, 1)[:, 0, 0]
        for row in range(B):
            groups = chosen[row].nonzero()[:, 0].tolist()
            hits = [pair for pair in held[row] if pair[1] in groups]
            others = [pair for pair in held[row] if pair[1] not in groups]
            missing = [group for group in groups if group not in [pair[1] for pair in held[row]]]
            taken = [(slot, group) for (slot, _), group in zip(others, missing, strict=False)]
            held[row] = others[len(taken) :] + hits + taken
            assert state.order[row, 0].tolist() == [slot for slot, _ in held[row]]
            assert [int(state.held[row, 0, slot]) for slot, _ in held[row]] == [group for _, group in held[row]]
