"""Recall's layers, growing and static, with a store on the device and in host memory (beside CPU tensors, ordinary
memory): the same bits, and what rows, crops, copies and growth make of it.

Shapes: B rows, H query heads, K KV heads, L tokens, D and DV widths.
"""

import copy
import pickle

import pytest
import torch
from caches.test_static_recall import EXACT, _qkv, _read
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import condense
from condense.caches import RecallLayer, StaticRecallLayer, static
from condense.ops.step.state import pinned_zeros
from condense.ops.triton import limits

METHOD = condense.Recall(group_size=4, window=6, num_recall=3)
HOSTS = [METHOD.replace(store="host", slots=slots) for slots in (0, 2, 5, 99)]
LENGTH = 200


def _layers(method):
    return RecallLayer(method), StaticRecallLayer(method, LENGTH)


def _buffers(layer):
    return layer.buffers if isinstance(layer, StaticRecallLayer) else layer._ring.buffers


@pytest.mark.parametrize("ragged", [False, True], ids=["alike", "ragged"])
def test_device_and_host_give_the_same_bits(ragged):
    """Growing layers and static ones, which hold their tokens in another order, among themselves."""
    generator = torch.Generator().manual_seed(3)
    layers = [layer for method in (METHOD, *HOSTS) for layer in _layers(method)]
    for seed, L in enumerate((23, *[1] * 40, 17, *[1] * 30)):
        counts = torch.randint(0, L + 1, (3,), generator=generator) if ragged else None
        outs = [_read(layer, _qkv(L, seed), counts) for layer in layers]
        for row, n in enumerate([L] * 3 if counts is None else counts.tolist()):
            mine = [out[row, :, L - n :] for out in outs]
            assert all(torch.equal(out, mine[i % 2]) for i, out in enumerate(mine))
            assert_close(mine[1], mine[0], **EXACT)
    for layer in layers[2:]:
        held = _buffers(layer).held
        assert held.shape[2] == layer.method.slots
        assert held.numel() == 0 or int(held.max()) >= 0


def test_a_closing_group_is_written_and_nothing_else_is_copied():
    """Over 240 steps, 60 closed groups, buffers move a few times; in between, their addresses stay."""
    layer, moves = RecallLayer(METHOD), 0
    _read(layer, _qkv(90))
    for i in range(240):
        before = [x.data_ptr() for x in _buffers(layer).entries(layer._settings)]
        _read(layer, _qkv(1, i))
        moves += before != [x.data_ptr() for x in _buffers(layer).entries(layer._settings)]
    # room for 16 groups at least is taken at a time
    assert 1 <= moves <= 4


def test_a_store_in_host_memory_has_room_for_the_next_power_of_two_groups_and_doubles_when_it_is_full():
    """Of 32 groups: memory that is pinned is scarce, and one group more than these would take twice as much."""
    layer, fresh = RecallLayer(HOSTS[1]), RecallLayer(METHOD)
    for L, groups in ((6 + 32 * 4, 32), (1, 32), (1, 32), (1, 32), (1, 64), (31 * 4, 64), (4, 128)):
        assert_close(_read(layer, _qkv(L, L)), _read(fresh, _qkv(L, L)), **EXACT)
        assert _buffers(layer).store.shape[2] == groups * 4


@pytest.mark.parametrize("method", [METHOD, HOSTS[2]], ids=["device", "host"])
def test_crop_across_closed_groups(method):
    """Groups that were taken back close again with other tokens: no slot has the old ones."""
    layer, fresh = RecallLayer(method), RecallLayer(METHOD)
    for part in (_qkv(60), *(_qkv(1, i) for i in range(30))):
        _read(layer, part)
    layer.crop(-20)
    for part in (_qkv(60), *(_qkv(1, i) for i in range(10)), *(_qkv(1, i) for i in range(100, 150))):
        want = _read(fresh, part)
    for i in range(100, 150):
        got = _read(layer, _qkv(1, i))
    assert torch.equal(got, want)


ROWS = {
    "repeat": (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda layer: layer.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "same": (copy.deepcopy, [0, 1, 2]),
    "pickle": (lambda layer: pickle.loads(pickle.dumps(layer)), [0, 1, 2]),
}


@pytest.mark.parametrize("method", [METHOD, HOSTS[2]], ids=["device", "host"])
@pytest.mark.parametrize(("change", "rows"), ROWS.values(), ids=ROWS)
def test_rows_and_copies(change, rows, method):
    layer, plain = RecallLayer(method), RecallLayer(METHOD)
    for part in (_qkv(60), *(_qkv(1, i) for i in range(30))):
        _read(layer, part)
        _read(plain, part)
    layer = change(layer) or layer
    for i in range(30):
        got = _read(layer, [x[rows] for x in _qkv(1, i)])
        assert torch.equal(got, _read(plain, _qkv(1, i))[rows])


def test_static_layers_start_anew_and_are_copied():
    layer, fresh = (StaticRecallLayer(HOSTS[1], LENGTH) for _ in range(2))
    for part in (_qkv(60, 7), *(_qkv(1, i) for i in range(20))):
        _read(layer, part)
    layer.reset()
    for part in (_qkv(40), *(_qkv(1, i) for i in range(20))):
        _read(layer, part)
        _read(fresh, part)
    other = pickle.loads(pickle.dumps(layer))
    for i in range(20):
        want = _read(fresh, _qkv(1, i))
        assert torch.equal(_read(layer, _qkv(1, i)), want)
        assert torch.equal(_read(other, _qkv(1, i)), want)


@pytest.mark.parametrize("layer", _layers(HOSTS[1]), ids=["growing", "static"])
def test_what_a_store_in_host_memory_refuses(layer):
    with pytest.raises(ValueError, match=r"beams.*use store='device'"):
        layer.reorder_cache(torch.tensor([1, 0, 2]))
    with pytest.raises(ValueError, match=r"store='host'|stays where it is"):
        layer.offload()


def test_an_odd_width_with_4_bits_is_refused_before_anything_is_kept():
    layer = RecallLayer(METHOD.replace(index_bits=4))
    with pytest.raises(ValueError, match="index_bits=4 needs an even key width, got 5"):
        _read(layer, [x[..., :5] for x in _qkv(3)])
    assert not layer.is_initialized
    assert layer.get_seq_length() == 0


def test_memory_that_cannot_be_pinned_names_the_way_out(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(RuntimeError, match=r"wants 4,096 bytes .* 8 tokens.*store='device', a shorter cache"):
        pinned_zeros((1, 2, 8, 64), torch.float32)


def test_gradients_flow_past_a_cache_that_goes_on():
    """What attention reads of earlier tokens is not overwritten by later ones before the backward pass."""
    layer = RecallLayer(METHOD)
    _read(layer, _qkv(40))
    q, k, v = (x.requires_grad_() for x in _qkv(3, 1))
    out = _read(layer, (q, k, v))
    with torch.no_grad():
        for i in range(20):
            _read(layer, _qkv(1, i))
    out.sum().backward()
    assert bool(q.grad.isfinite().all())


def test_more_groups_than_kernels_choose_from_are_refused_before_memory_is_taken(monkeypatch):
    """As above: a long prompt would otherwise be read whole before its first step says so."""
    monkeypatch.setattr(limits, "absence", lambda device: None)
    monkeypatch.setattr(static, "new_buffers", lambda *args, **kwargs: None)
    with FakeTensorMode():
        k = torch.empty(1, 1, 3, 16, device="cuda")
    layer = StaticRecallLayer(METHOD.replace(store="host"), LENGTH)
    layer.latent_width = 0
    layer._take_memory(k, k, M=limits.MAX_GROUPS, W=8)
    with pytest.raises(ValueError, match=r"up to 32,768 groups, got room for 32,769 .a larger group_size"):
        layer._take_memory(k, k, M=limits.MAX_GROUPS + 1, W=8)
