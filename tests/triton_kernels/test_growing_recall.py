"""Recall's growing layer on prepared steps: the bits of one operation per token, whatever happens between tokens.

Interpreted in float32 on a CPU, compiled on a GPU. Shapes: B rows, H query heads, K KV heads, L tokens, D width.
"""

import copy
import weakref

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton_kernels.test_growing_layer import DEVICE, SCALE, B, Counting, D, H, _qkv, started  # noqa: F401

import condense
from condense.caches import CondensedLayer, read_request, ring
from condense.caches.ring import room_for
from condense.caches.store import finish_writes
from condense.ops import Extras

RECALL = condense.Recall(group_size=4, window=6, num_recall=2)
METHODS = {
    "recall": RECALL,
    "drop": RECALL.replace(unchosen="drop", index_bits=16),
    "a-share": RECALL.replace(num_recall=0.4, index_bits=4),
    "entries-8-weighted": RECALL.replace(entry_bits=8, key_pooling="weighted", value_pooling="weighted"),
    "entries-4-matched": RECALL.replace(entry_bits=4, store_bits=4, rep_bias="matched"),
    "host": RECALL.replace(store="host", slots=3),
    "exact-prompt": RECALL.replace(prompt="exact", store_bits=8),
}


class Operating(CondensedLayer):
    """Every token is read by one operation."""

    def _keep(self, *args):
        super()._keep(*args)
        self._ring._prepare = lambda *args: None


@pytest.fixture(autouse=True)
def stepping(monkeypatch):
    """As on a GPU: "auto" takes the kernels."""
    if DEVICE == "cpu":
        monkeypatch.setattr(ring, "step_backend", lambda *args, **kwargs: "triton")


def _pair(method):
    return CondensedLayer(method), Operating(method)


def _read(layer, qkv, counts=None, extras=None):
    """Outputs ``[B, H, L, D]`` of new tokens, of single ones after the first by a step."""
    q, k, v = qkv
    if q.shape[2] == 1 and layer.can_step(k, v):
        return layer.step(q, k, v, scale=SCALE, real=counts, extras=extras or Extras())
    context = layer.read(k, v, read_request(q, scale=SCALE, counts=counts))
    out = layer.method.attend(q, context, scale=SCALE, backend="torch")[0]
    if q.is_cuda:
        finish_writes(layer._ring.buffers)
    return out


def _agree(layers, qkv, **options):
    """The same bits: of the outputs, and of all that is kept."""
    assert torch.equal(*(_read(layer, qkv, **options) for layer in layers))
    one, other = (layer._ring for layer in layers)
    if DEVICE == "cuda":
        torch.cuda.synchronize()  # kernels write to host memory too
    assert all(torch.equal(x, y) for x, y in zip(one.buffers, other.buffers, strict=True))
    assert other._prepared is None


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_steps_are_the_bits_of_operations(method):
    """Over groups that close, room that runs out, and chunks between steps."""
    layers = _pair(method)
    for seed, L in enumerate((64, *[1] * 4, 3, *[1] * 4)):
        _agree(layers, _qkv(L, seed))
    assert layers[0]._ring._prepared is not None
    assert layers[0]._ring.buffers.entries_k.shape[2] > room_for(layers[0].method.layout.rule.closed(64))


@pytest.mark.parametrize("name", ["recall", "entries-8-weighted", "host"])
def test_rows_that_pause(name):
    """Left padding, and steps in which some rows have no token, by turns with steps in which all have one."""
    layers, generator = _pair(METHODS[name]), torch.Generator().manual_seed(3)
    _agree(layers, _qkv(19), counts=torch.tensor([19, 12]))
    for seed in range(9):
        counts = torch.randint(0, 2, (B,), generator=generator) if seed % 3 else None
        _agree(layers, _qkv(1, seed), counts=counts)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.crop(-3),
        lambda layer: layer.reorder_cache(torch.tensor([1, 0], device=DEVICE)),
        lambda layer: layer.batch_select_indices(torch.tensor([1], device=DEVICE)),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: (layer.offload(), layer.prefetch()),
    ],
    ids=["crop", "reorder", "select", "repeat", "offload"],
)
def test_changes_between_steps(change):
    layers = _pair(RECALL)
    for seed, L in enumerate((26, 1, 1, 1)):
        _agree(layers, _qkv(L, seed))
    for layer in layers:
        change(layer)
    rows = layers[0]._ring.buffers.seen.shape[0]
    for seed in range(4):
        _agree(layers, _qkv(1, 10 + seed, rows))


def test_tokens_that_are_laid_out_in_turn_in_several_ways():
    """A step is prepared for one way; for another it is prepared anew."""
    layers = _pair(RECALL)
    _agree(layers, _qkv(20))
    q, k, v = plain = _qkv(1)
    wide = [torch.cat([x, x], dim=3)[..., :D] for x in plain]
    spread = [torch.stack([x, x], dim=4)[..., 0] for x in plain]
    shifted = [torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x) for x in plain]
    sink = torch.ones(H + 1, device=DEVICE)
    tokens = [plain, wide, spread, (shifted[0], k, v), (q, shifted[1], v), (q, k, shifted[2])]
    steps = [(new, {}) for new in tokens]
    steps += [
        (plain, {"extras": Extras(softcap, sink_logits)})
        for softcap, sink_logits in ((2.0, sink[:H]), (2.0, sink[1:]), (3.0, sink[1:]))
    ]
    steps += [(plain, {"counts": torch.tensor([1, 0])})]
    last = None
    for new, options in steps:
        _agree(layers, new, **options)
        assert layers[0]._ring._prepared is not last
        last = layers[0]._ring._prepared
    _agree(layers, new, **options)
    assert layers[0]._ring._prepared is last


@pytest.mark.parametrize("name", ["recall", "entries-4-matched", "host"])
def test_a_step_allocates_and_starts_kernels(name, started):  # noqa: F811
    """But for the steps that make room, which pad."""
    layer = CondensedLayer(METHODS[name])
    for L in (31, 1):
        _read(layer, _qkv(L))
    started.clear()
    for i in range(5):
        new, before = _qkv(1, i), layer._ring.buffers
        with Counting() as counting:
            _read(layer, new)
        memory = ["aten.empty.memory_format", "aten.split_with_sizes.default"]
        assert counting.names[-5:] == [*memory, *memory, memory[0]]
        if layer._ring.buffers is before:
            assert len(counting.names) == 5
        assert len(started) == 5
        started.clear()


def test_rows_that_are_left_out_free_their_memory():
    layer = CondensedLayer(RECALL)
    for L in (20, 1):
        _read(layer, _qkv(L))
    old = [weakref.ref(x) for x in layer._ring.buffers]
    layer.batch_select_indices(torch.tensor([1], device=DEVICE))
    assert [x() for x in old] == [None] * len(old)


def test_a_prompt_that_needs_longer_buffers_frees_the_shorter_ones():
    layer = CondensedLayer(RECALL)
    for L in (20, 1):
        _read(layer, _qkv(L))
    store = weakref.ref(layer._ring.buffers.store)
    _read(layer, _qkv(4 * room_for(20)))
    assert store() is None


def test_a_copy_goes_its_own_way():
    layers = _pair(METHODS["host"])
    for L in (20, 1):
        _agree(layers, _qkv(L))
    twins = copy.deepcopy(layers)
    assert twins[0]._ring._prepared is None
    for i in range(3):
        _agree(twins, _qkv(1, i))
        _agree(layers, _qkv(1, 50 + i))


def test_a_trace_gets_one_operation():
    """Subclasses of tensors see the step by name, and none is prepared."""
    layer, seen = CondensedLayer(RECALL), []
    _read(layer, _qkv(20))

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(str(func))
            with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
                return func(*args, **(kwargs or {}))

    q, k, v = _qkv(1)
    _read(layer, (q.as_subclass(Seen), k, v))
    assert "condense.step.default" in seen
    assert layer._ring._prepared is None
