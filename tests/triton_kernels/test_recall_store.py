"""Recall's decode step over stores and entries in 8 and 4 bits, with entries of any pooling and biases of their own.

Against the PyTorch step on the same state; interpreted in float32 on a CPU, compiled for every dtype on a GPU.
"""

import dataclasses

import pytest
import torch
from ops.test_recall_step import CASES, check_slots, empty_state, new_token, settings_of
from triton_kernels.test_recall_step import DEVICE, SCALE, check_choice, compare, random_qkv, scratch  # noqa: F401

from condense.bench.budget import judge
from condense.ops.recall import EntrySettings, StoreFormat
from condense.ops.torch import recall_step as torch_step
from condense.ops.triton import recall_step as triton_step
from condense.ops.triton.limits import DTYPES

CUDA = DEVICE == "cuda"
# name of the case, bits of the store, widths
STORES = [("bounds-8", 8, (16, 24)), ("sub_means-8", 4, (24, 16)), ("g-1", 4, (16, 16)), ("a-third", 8, (40, 16))]
if CUDA:
    STORES += [("bounds-8", bits, widths) for bits in (8, 4) for widths in ((128, 128), (80, 80), (192, 128))]
ENTRIES = {
    "matched-means": EntrySettings(num_summary=4, matched=True),
    "matched-weighted": EntrySettings("weighted", "weighted", num_summary=4, matched=True),
    "select-max": EntrySettings("select", "max", bias=1.0, num_summary=4),
    # of poolings without sums, whose order would decide some codes
    "select-max-8-bits": EntrySettings("select", "max", bias=1.0, num_summary=4, bits=8),
    "matched-max-select-4-bits": EntrySettings("max", "select", num_summary=4, matched=True, bits=4),
}


def with_fields(name, **fields):
    return dataclasses.replace(settings_of(CASES[name]), **fields)


@pytest.mark.parametrize(("name", "bits", "widths"), STORES, ids=str)
def test_stores_in_fewer_bits(name, bits, widths, scratch):  # noqa: F811
    """Bytes of the store, too: those of the definition."""
    compare(*random_qkv(1, 2, 1, 33, *widths), with_fields(name, store_bits=bits), scratch)


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
def test_entries_that_a_summary_weighs(entries, scratch):  # noqa: F811
    compare(*random_qkv(1, 4, 2, 33, 16, 24), with_fields("bounds-8", entries=entries), scratch)


@pytest.mark.parametrize(("latent", "D"), [(32, 48), (512, 576), (256, 288)] if CUDA else [(32, 48)], ids=str)
@pytest.mark.parametrize(("bits", "pooling"), [(16, "weighted"), (8, "select"), (4, "max")])
def test_latents(latent, D, bits, pooling, scratch):  # noqa: F811
    """Values are columns of the keys, entries pooled whole, one KV head for all query heads, of which there are two
    tiles.
    """
    entries = EntrySettings(pooling, num_summary=4, matched=True, bits=bits)
    settings = with_fields("bounds-8", store_bits=bits, entries=entries)
    compare(*random_qkv(1, 20, 1, 30, D, 0), settings, scratch, latent=latent)


@pytest.mark.parametrize("bits", [8, 4])
def test_slots_hold_pieces(bits, scratch):  # noqa: F811
    """The same bits as without slots, and the slots of the definition; a row pauses."""
    settings, (q, k, v) = with_fields("bounds-16", store_bits=bits), random_qkv(1, 2, 1, 30, 16, 24)
    made = {"rows": 1, "widths": (16, 24), "dtype": torch.float32, "device": DEVICE}
    states = [empty_state(settings, 30, 1, slots=n, **made) for n in (0, 3)]
    theirs = empty_state(settings, 30, 1, slots=3, **made)
    for t in range(30):
        new = new_token((q, k, v), t)._replace(real=torch.tensor([t % 7 != 5], device=DEVICE))
        if t < 20 and not CUDA:  # what the interpreter takes longest for is not asked
            for state in (*states, theirs):
                torch_step.recall_step(new, state, settings, scale=SCALE)
            continue
        outs = [triton_step.recall_step(new, state, settings, scale=SCALE) for state in states]
        torch_step.recall_step(new, theirs, settings, scale=SCALE)
        assert torch.equal(*outs)
        for state in states:
            check_slots(state, settings.rule.chunk)
        assert torch.equal(states[1].held, theirs.held)
        assert torch.equal(states[1].slots, theirs.slots)


def exactly(state, settings, D, Dv, dtype):
    """The state in float64, store and entries as the numbers that are read of them."""
    numbers, form = torch.cat(settings.store_format.unpack(state.store, D, Dv, dtype), dim=3), settings.entries.format
    entries_k, entries_v = form.unpack(state.entries_k, D, dtype), form.unpack(state.entries_v, Dv, dtype)
    state = state._replace(entries_k=entries_k, entries_v=entries_v, store=numbers)
    state = state._replace(slots=state.slots[:, :, :0], held=state.held[..., :0])
    return type(state)(*(x.double() if x.is_floating_point() else x.clone() for x in state))


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dtype", DTYPES if CUDA else [torch.float32], ids=str)
def test_outputs_are_within_the_error_budget(bits, dtype, scratch):  # noqa: F811
    """Twice the error of the same step in PyTorch, all of them over one quantised store and its quantised entries."""
    g, w, L, (D, Dv) = (16, 40, 420, (128, 128)) if CUDA else (4, 6, 40, (16, 24))
    entries = EntrySettings("weighted", "mean", num_summary=g, matched=True, bits=bits)
    case = (g, w, "bounds", g // 2, 8, 3)
    settings = dataclasses.replace(settings_of(case), store_bits=bits, entries=entries)
    exact = dataclasses.replace(settings, store_bits=16, entries=entries._replace(bits=16))
    qkv, results = random_qkv(2, 8, 2, L, D, Dv, dtype=dtype), []
    state = empty_state(settings, L, 2, rows=2, widths=(D, Dv), dtype=dtype, device=DEVICE)
    for t in range(L):
        new = new_token(qkv, t)
        before = type(state)(*(x.clone() for x in state))
        plain = torch_step.recall_step(new, state, settings, scale=SCALE / 4)
        if t < L - 6:
            continue
        wide = exactly(before, settings, D, Dv, dtype)
        got = triton_step.recall_step(new, before, settings, scale=SCALE / 4)
        # a group that closes now is rounded and quantised in one of the two only
        if settings.rule.closed(t + 1) == settings.rule.closed(t) and check_choice(
            scratch, new.q, before, settings, SCALE / 4
        ):
            double = type(new)(*(x.double() for x in new[:3]))
            results.append((got, torch_step.recall_step(double, wide, exact, scale=SCALE / 4), plain))
    assert len(results) > 1
    verdict = judge(*(list(x) for x in zip(*results, strict=True)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", ["all-open", "none-open"])
def test_the_largest_numbers_of_float16_stay_finite(case, bits):
    """In tokens of open groups, and in entries where none is open; the query is 0, so only infinity changes weights."""
    settings = with_fields(case, store_bits=bits, entries=EntrySettings("max", "max", bits=bits))
    _, k, v = (x.sign() * (65504 - 2048 * x.abs()) for x in random_qkv(1, 2, 1, 20, 16, 24))
    qkv = [x.to(torch.float16) for x in (torch.zeros(1, 2, 20, 16, device=DEVICE), k, v)]
    states = [
        empty_state(settings, 20, 1, rows=1, widths=(16, 24), dtype=torch.float16, device=DEVICE) for _ in range(2)
    ]
    for t in range(20):
        want, got = (
            step.recall_step(new_token(qkv, t), state, settings, scale=SCALE)
            for step, state in zip((torch_step, triton_step if t == 19 else torch_step), states, strict=True)
        )
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got, want, rtol=2**-9, atol=0)


def test_what_a_piece_holds_begins_at_whole_numbers():
    """Groups of any size, so that steps and zeros are read at their alignment."""
    for g, D, Dv, size in ((1, 16, 24, 4), (3, 10, 6, 4), (5, 2, 2, 8), (6, 128, 64, 2)):
        for bits in (8, 4):
            assert g * StoreFormat(bits, g).width(D, Dv, size) % size == 0
