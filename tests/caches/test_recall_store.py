"""Recall's layers, growing and static, with stores on the device and in host memory: the same bits in all they do."""

import copy
import itertools
import pickle
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from layers import CHANGES, columns, draw, read
from models import tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import condense
from condense.caches import CondensedLayer, StaticCondensedLayer
from condense.caches.store import Store
from condense.methods import step_settings
from condense.ops.tensors.pinned import pinned_zeros
from condense.ops.triton import limits
from condense.state import SLACK

METHOD = condense.Recall(group_size=4, window=6, num_recall=3)
HOSTS = [METHOD.replace(store="host", slots=slots) for slots in (0, 2, 5, 99)]
LENGTH = 200
B, K, D, DV = 3, 2, 6, 5
SCALE = 0.7
EXACT = {"rtol": 0, "atol": 1e-12}
_qkv = partial(draw, rows=B, widths=(D, DV))
ROWS = {name: CHANGES[name] for name in ("repeat", "select")} | {
    "same": (copy.deepcopy, [0, 1, 2]),
    "pickle": (lambda layer: pickle.loads(pickle.dumps(layer)), [0, 1, 2]),
}
ODD = METHOD.replace(store_bits=4), 4, "store_bits=4 needs keys and values of even widths, got 6 and 5"
FIRST = {
    "too-long": (StaticCondensedLayer, 41, METHOD, 6, "got 0 and 41 more; make it longer"),
    "odd-width": (StaticCondensedLayer, 3, *ODD), "odd-width-step": (StaticCondensedLayer, 1, *ODD),
    "odd-width-growing": (lambda method, _: CondensedLayer(method), 3, *ODD),
}  # fmt: skip
ENDING = {name: CHANGES[name][0] for name in ("reorder", "select")}
ENDING |= {"reset": lambda layer: layer.reset(), "crop": lambda layer: layer.crop(-1), "copy": copy.deepcopy}


def _layers(method):
    return CondensedLayer(method), StaticCondensedLayer(method, LENGTH)


def _buffers(layer):
    return layer.buffers if isinstance(layer, StaticCondensedLayer) else layer._ring.buffers


def _ones(*seeds):
    return [_qkv(1, seed) for seed in range(*seeds)]


def _read(layer, *parts):
    return [read(layer, part) for part in parts][-1]


@pytest.mark.parametrize("ragged", [False, True], ids=["alike", "ragged"])
def test_device_and_host_give_the_same_bits(ragged):
    """Growing layers and static ones, which hold their tokens in another order, among themselves."""
    generator = torch.Generator().manual_seed(3)
    layers = [layer for method in (METHOD, *HOSTS) for layer in _layers(method)]
    for seed, L in enumerate((23, *[1] * 12, 17, *[1] * 9)):
        counts = torch.randint(0, L + 1, (3,), generator=generator) if ragged else None
        assert L > 1 or all(layer.can_step(*_qkv(1)[1:]) for layer in layers)
        outs = [read(layer, _qkv(L, seed), counts) for layer in layers]
        for row, n in enumerate([L] * 3 if counts is None else counts.tolist()):
            mine = [out[row, :, L - n :] for out in outs]
            assert all(torch.equal(out, mine[i % 2]) for i, out in enumerate(mine))
            assert_close(mine[1], mine[0], **EXACT)


def test_a_closing_group_is_written_and_nothing_else_is_copied():
    """Over 240 steps, 60 closed groups, buffers move a few times; in between, their addresses stay."""
    layer, moves = CondensedLayer(METHOD), 0
    read(layer, _qkv(90))
    for new in _ones(240):
        before = [x.data_ptr() for x in _buffers(layer).entries(layer.store.settings)]
        read(layer, new)
        moves += before != [x.data_ptr() for x in _buffers(layer).entries(layer.store.settings)]
    assert 1 <= moves <= 4


def test_a_full_store_in_host_memory_grows_by_a_quarter():
    """Prompts read in pieces would otherwise pin anew at every piece, which takes long."""
    layer, fresh = CondensedLayer(HOSTS[1]), CondensedLayer(METHOD)
    for L, groups in ((6 + 128 * 4, 144), (16 * 4, 144), (4, 180), (36 * 4, 225), (300, 281)):
        assert_close(read(layer, _qkv(L, L)), read(fresh, _qkv(L, L)), **EXACT)
        assert _buffers(layer).store.shape[2] == groups * 4


@pytest.mark.parametrize("method", [METHOD, HOSTS[2]], ids=["device", "host"])
def test_crops_stop_where_a_sum_of_values_was_overwritten(method):
    method, qkv, refused = method.replace(group_size=7, window=2), _qkv(90), 0
    filled = CondensedLayer(method)
    _read(filled, columns(qkv, 0, 40), *(columns(qkv, t, t + 1) for t in range(40, 70)))
    for counts in itertools.product((14, 17, 20, 26), (1, 6, 17)):
        layer, seen = copy.deepcopy(filled), 70
        for count in counts:
            try:
                layer.crop(-count)
            except ValueError:
                refused += 1
                assert seen < 70 or count > SLACK
            else:
                seen -= count
            want = condense.attention(*columns(qkv, 0, seen + 6), method=method, scale=SCALE)
            outs = [read(layer, columns(qkv, *ends)) for ends in ((seen, seen + 5), (seen + 5, seen + 6))]
            assert_close(torch.cat(outs, dim=2), want[:, :, -6:], **EXACT)
            seen += 6
    assert 0 < refused < 12


@pytest.mark.parametrize("method", [METHOD, HOSTS[2]], ids=["device", "host"])
@pytest.mark.parametrize(("change", "rows"), ROWS.values(), ids=ROWS)
def test_rows_and_copies(change, rows, method):
    layer, plain = CondensedLayer(method), CondensedLayer(METHOD)
    for each in (layer, plain):
        _read(each, _qkv(60), *_ones(30))
    layer = change(layer) or layer
    for new in _ones(30):
        assert_close(read(layer, [x[rows] for x in new]), read(plain, new)[rows], **EXACT)


def test_static_layers_start_anew_and_are_copied():
    layer, fresh = (StaticCondensedLayer(HOSTS[1], LENGTH) for _ in range(2))
    _read(layer, _qkv(60, 7), *_ones(20))
    layer.reset()
    for each in (layer, fresh):
        _read(each, _qkv(40), *_ones(20))
    other = pickle.loads(pickle.dumps(layer))
    for new in _ones(20):
        want = read(fresh, new)
        assert all(torch.equal(read(each, new), want) for each in (layer, other))


@pytest.mark.parametrize("change", ENDING.values(), ids=ENDING)
def test_tokens_that_were_fetched_are_not_read_once_others_are_stored(change):
    """A forward that was broken off leaves what it fetched for a layer behind it."""
    layer = CondensedLayer(METHOD)
    _read(layer, _qkv(60), _qkv(1))
    layer.store._fetched = torch.full_like(layer._ring.buffers.store, torch.nan)
    layer = change(layer) or layer
    assert layer.store._fetched is None


@pytest.mark.parametrize("layer", _layers(HOSTS[1]), ids=["growing", "static"])
def test_what_a_store_in_host_memory_refuses(layer):
    tiny.refused(r"beams.*use store='device'", layer.reorder_cache, torch.tensor([1, 0, 2]))
    tiny.refused(r"store='host'|stays where it is", layer.offload)


def test_memory_that_cannot_be_pinned_names_the_way_out(monkeypatch):
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match=r"wants 4,096 bytes .*store='device', a shorter cache"):
        pinned_zeros((1, 2, 8, 64), torch.float32, torch.device("cuda"))


def test_gradients_flow_past_a_cache_that_goes_on():
    layer = CondensedLayer(METHOD)
    read(layer, _qkv(40))
    q, k, v = (x.requires_grad_() for x in _qkv(3, 1))
    out = read(layer, (q, k, v))
    with torch.no_grad():
        _read(layer, *_ones(20))
    out.sum().backward()
    assert bool(q.grad.isfinite().all())


def test_more_groups_than_kernels_choose_from_are_refused_before_memory_is_taken(monkeypatch):
    monkeypatch.setattr(limits, "absence", lambda device: [])
    with FakeTensorMode():
        k = torch.empty(1, 1, 3, 16, device="cuda")
    held = Store(step_settings(METHOD.replace(store="host")))
    held.check(k, k, 0, groups=limits.MAX_GROUPS)
    said = r"up to 32,768 groups, got room for 32,769 .a larger group_size"
    tiny.refused(said, held.check, k, k, 0, groups=limits.MAX_GROUPS + 1)


@pytest.mark.parametrize(("make", "tokens", "method", "width", "message"), FIRST.values(), ids=FIRST)
def test_a_first_call_that_is_refused_leaves_no_memory(make, tokens, method, width, message):
    """After it, tokens of a ``width`` that fits are read."""
    layer = make(method, 40)
    tiny.refused(message, read, layer, _qkv(tokens))
    assert not layer.is_initialized
    assert layer.get_seq_length() == 0
    assert isinstance(layer, CondensedLayer) or (layer.buffers is None and layer.count_slots() == 0)
    fits = [x[..., :width] for x in _qkv(40)]
    want = condense.attention(*fits, method=method, scale=SCALE, backend="reference")
    assert_close(read(layer, fits), want, **EXACT)


@pytest.mark.parametrize("layer", [layer for method in HOSTS for layer in _layers(method)])
def test_there_are_no_more_slots_than_room_for_groups(layer):
    """A growing layer gets more when it grows, and keeps what it has."""
    read(layer, _qkv(30))
    for t in range(120):
        before = _buffers(layer)
        before.held[:, :, -1:], before.slots[:, :, -4:] = t, t
        read(layer, _qkv(1, t))
        S, after, added = before.held.shape[2], _buffers(layer), _buffers(layer).held.shape[2] - before.held.shape[2]
        assert added + S == min(layer.method.slots, after.entries_k.shape[2])
        assert after.order[0, 0].tolist() == [*range(S, S + added), *before.order[0, 0].tolist()]
        assert torch.equal(after.held[:, :, :S], before.held)
        assert torch.equal(after.slots[:, :, : S * 4], before.slots)
        assert bool((after.held[:, :, S:] == -1).all())
    tokens = after.slots.nbytes, after.held.nbytes + after.order.nbytes
    assert tokens == ((S + added) * B * K * 4 * (D + DV) * 8, (S + added) * B * K * 2 * 4)


@pytest.mark.parametrize(
    ("length", "dtype", "slots"),
    [(100, torch.float32, None), (100, torch.bfloat16, 5), (100, torch.bfloat16, 99), (5, torch.float64, 99)],
)
def test_bytes(length, dtype, slots):
    """All closed groups of ``length`` tokens, in blocks of 16, with index and tokens, the window and a group, two sums
    and two counters; slots, no more than these groups, with tokens and two numbers of 4 bytes.
    """
    method = METHOD if slots is None else METHOD.replace(store="host", slots=slots)
    layer = StaticCondensedLayer(method, length)
    layer.lazy_initialization(*[x.to(dtype) for x in _qkv(0)[1:]])
    groups, ring = -(-max(1, (length - 6) // 4) // 16) * 16, min(length, 10)
    copies = min(slots or 0, groups)
    numbers = ((groups + copies) * 4 + ring) * (D + DV) * dtype.itemsize + copies * 8 + 2 * DV * 8
    index = groups * ((4 + 4) * -(-D // 8) + (4 + 1) * dtype.itemsize)
    held = sum(x.untyped_storage().nbytes() for x in (*layer.buffers, layer.num_slots))
    assert held == B * (K * (numbers + index) + 8) + 8
