"""One decode step over buffers at fixed addresses: any method, padded and dead rows, entries of the growing path."""

import pytest
import torch
from grids import fixture_of
from layers import columns, extend
from oracles import cases, oracle
from step_states import RECALLS, call_of, empty, token_at

import condense
from condense.methods import step_settings
from condense.ops import NewToken, decode_step, step, step_backend
from condense.ops.triton import limits

EXACT = {"rtol": 1e-12, "atol": 1e-12}
GRID = {
    "own-biases": condense.DGA(group_size=4, gamma=0.5, focal="random", rep_bias="log_size"),
    "g-1-window-0": condense.CCA(group_size=1, window=0, rep_bias="log_size"),
    "window-below-g": condense.LCA(group_size=7, window=5, rep_bias="log_size"),
    "more-queries-than-tokens": condense.LCA(group_size=2, window=1, num_summary_queries=11),
    "fewer-queries": condense.CCA(group_size=6, window=8, summary="streaming", num_summary_queries=2),
    "select-max": condense.CCA(group_size=4, window=8, key_pooling="select", value_pooling="max"),
}
METHODS = cases.PLANS | GRID | RECALLS | {"dropped": RECALLS["three-open"].replace(unchosen="drop")}
B, H, K, D, DV = 2, 4, 2, 6, 5
SCALE = 0.6
FULL = {"tokens": (condense.CCA(group_size=2, window=3), 20, None), "groups": (RECALLS["two-open"], 60, 3)}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BACKENDS = [
    (CPU, torch.bfloat16, (128, 128), condense.CCA(), 0, "torch"),
    (CUDA, torch.bfloat16, (128, 128), condense.CCA(), 0, "triton"),
    (CUDA, torch.float64, (128, 128), condense.CCA(), 0, "torch"),
    (CUDA, torch.bfloat16, (128, 257), condense.CCA(), 0, "torch"),
    (CUDA, torch.bfloat16, (128, 128), condense.DGA(focal="random"), 0, "torch"),
    (CUDA, torch.bfloat16, (576, 0), condense.LCA(), 512, "triton"),
    (CUDA, torch.bfloat16, (577, 0), condense.LCA(), 513, "torch"),
]
method = fixture_of(METHODS)


def empty_state(method, length, **options):
    return empty(step_settings(method), length, K, (D, DV), **options)


def take(method, state, token, backend="torch"):
    return decode_step(call_of(step_settings(method), state, token, scale=SCALE), method.represent, backend=backend)


def test_tokens_are_taken_back_from_larger_rings(method):
    qkv, other = (oracle.random_qkv(B, H, K, 90, D, DV, seed=seed) for seed in (0, 1))
    state = empty_state(method, 90, spare=5)
    for end, count in ((30, 5), (33, 1), (41, 4), (60, 5), (66, 5)):
        for i in range(int(state.seen[0]), end):
            take(method, state, columns(qkv if i < end - count else other, i, i + 1))
        state.seen.sub_(count)
    got = torch.cat([take(method, state, columns(qkv, i, i + 1)) for i in range(61, 90)], dim=2)
    want = condense.attention(*qkv, method=method, scale=SCALE, backend="reference")
    torch.testing.assert_close(got, want[:, :, 61:], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_entries_are_those_of_the_growing_path_to_the_bit(method, dtype):
    """An anchor is a discontinuous choice. Outputs differ by the order of sums: a unit or two in the last place."""
    qkv = [x.to(dtype) for x in oracle.random_qkv(B, H, K, 60, D, DV)]
    state, past = empty_state(method, 60, dtype=dtype), None
    for i in range(60):
        new = columns(qkv, i, i + 1)
        sources, past = extend(method, past, *new, scale=SCALE, backend="torch")
        want, got = method.attend(new[0], sources, scale=SCALE, backend="torch")[0], take(method, state, new)
        if dtype.itemsize == 2:
            assert float((got - want).abs().max()) <= 2 * torch.finfo(dtype).eps * float(want.abs().max())
        n = past.entries[0].shape[2]
        if n > 0:
            held = state.entries(step_settings(method))
            assert all(torch.equal(x[:, :, : y.shape[2]], y) for x, y in zip(held, past.entries, strict=True))
    assert n == state.entries_k.shape[2]


@pytest.mark.parametrize("integer", [False, True], ids=["bool", "int"])
def test_rows_that_are_not_real(method, integer):
    real = torch.rand(3, 60, generator=torch.Generator().manual_seed(5)) < torch.tensor([0.9, 0.5, 0.0])[:, None]
    qkv, state, outs = oracle.random_qkv(3, H, K, 60, D, DV), empty_state(method, 60, rows=3), []
    for i in range(60):
        dead = ~real[:, i]
        new = [x.masked_fill(dead[:, None, None, None], float("nan")) for x in columns(qkv, i, i + 1)]
        before = [x[dead].clone() for x in state]
        outs.append(take(method, state, NewToken(*new, real[:, i].int() if integer else real[:, i])))
        assert all(torch.equal(x[dead], y) for x, y in zip(state, before, strict=True))
        assert not outs[-1][dead].any()
    out = torch.cat(outs, dim=2)
    for row in range(3):
        mine = [x[row : row + 1][:, :, real[row]] for x in (*qkv, out)]
        if mine[0].shape[2]:
            want = condense.attention(*mine[:3], method=method, scale=SCALE, backend="reference")
            torch.testing.assert_close(mine[3], want, **EXACT)
    assert state.seen.tolist() == real.sum(1).tolist()


@pytest.mark.parametrize(("method", "length", "entries"), FULL.values(), ids=FULL)
def test_a_step_too_many_stays_inside(method, length, entries):
    """A compiled step cannot look how full the buffers are: what has no room is dropped, the rest stands."""
    qkv, settings = oracle.random_qkv(B, H, K, 60, D, DV), step_settings(method)
    state, larger = empty_state(method, length, entries=entries), empty_state(method, 60)
    for t in range(60):
        out, want = (take(method, each, token_at(qkv, t)) for each in (state, larger))
        assert bool(out.isfinite().all())
        if t < 20:  # until then there is room for all
            torch.testing.assert_close(out, want, **EXACT)
    for x, y in zip(state.entries(settings), larger.entries(settings), strict=True):
        assert torch.equal(x, y[:, :, : x.shape[2]])


def test_a_state_to_choose_from_has_room_for_a_group():
    sizes = step.StateSizes(1, 1, (8, 8), tokens=9)
    with pytest.raises(ValueError, match=r"sizes\.entries must be at least 1 where groups are chosen, got 0"):
        step.empty_state(torch.empty(0), step_settings(RECALLS["two-open"]), sizes)


@pytest.mark.parametrize(("backend", "said"), [("reference", "of a step must be"), ("triton", "'triton'")])
def test_which_backends_take_a_step(backend, said):
    method, state = RECALLS["three-open"], empty_state(RECALLS["three-open"], 40)
    token = token_at(oracle.random_qkv(B, H, K, 1, D, DV), 0)
    with pytest.raises(ValueError, match=f"backend {said}"):
        take(method, state, token, backend)


@pytest.mark.parametrize(("device", "dtype", "widths", "method", "latent", "backend"), BACKENDS, ids=str)
def test_backends_of_a_step(monkeypatch, device, dtype, widths, method, latent, backend):
    monkeypatch.setattr(limits, "_HAS_TRITON", True)
    assert step_backend(device, dtype, widths, step_settings(method), latent=latent) == backend
