"""Recall's growing layer on prepared steps: the bits of one operation per token, whatever happens between tokens.

Interpreted in float32 on a CPU, compiled on a GPU. Shapes: B rows, H query heads, K KV heads, L tokens, D width.
"""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton_kernels.test_growing_layer import (  # noqa: F401
    DEVICE,
    RECALL,
    B,
    Counting,
    D,
    H,
    agree,
    draw_tokens,
    pair,
    read_by,
    started,
    stepping,
)

from condense.caches import CondensedLayer
from condense.caches.ring import room_for
from condense.ops import Extras

METHODS = {
    "recall": RECALL,
    "drop": RECALL.replace(unchosen="drop"),
    "a-share": RECALL.replace(num_recall=0.4),
    "entries-8-weighted": RECALL.replace(entry_bits=8, key_pooling="weighted", value_pooling="weighted"),
    "entries-4-matched": RECALL.replace(entry_bits=4, store_bits=4, rep_bias="matched"),
    "host": RECALL.replace(store="host", slots=3),
    "exact-prompt": RECALL.replace(prompt="exact", store_bits=8),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_steps_are_the_bits_of_operations(method):
    """Over groups that close, room that runs out, and chunks between steps."""
    layers = pair(method)
    for seed, L in enumerate((64, *[1] * 4, 3, *[1] * 4)):
        agree(layers, L, seed)
    assert layers[0]._ring._prepared is not None
    assert layers[0]._ring.buffers.entries_k.shape[2] > room_for(layers[0].method.layout.rule.closed(64))


@pytest.mark.parametrize("name", ["recall", "entries-8-weighted", "host"])
def test_rows_that_pause(name):
    """Left padding, and steps in which some rows have no token, by turns with steps in which all have one."""
    layers, generator = pair(METHODS[name]), torch.Generator().manual_seed(3)
    agree(layers, 19, 0, torch.tensor([19, 12]))
    for seed in range(9):
        counts = torch.randint(0, 2, (B,), generator=generator) if seed % 3 else None
        agree(layers, 1, seed, counts)


def test_tokens_that_are_laid_out_in_turn_in_several_ways():
    """A step is prepared for one way; for another it is prepared anew."""
    layers = pair(RECALL)
    agree(layers, 20, 0)
    q, k, v = plain = draw_tokens(1)
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
        agree(layers, 1, 0, qkv=new, **options)
        assert layers[0]._ring._prepared is not last
        last = layers[0]._ring._prepared
    agree(layers, 1, 0, qkv=new, **options)
    assert layers[0]._ring._prepared is last


@pytest.mark.parametrize("name", ["recall", "entries-4-matched", "host"])
def test_a_step_allocates_and_starts_kernels(name, started):  # noqa: F811
    """But for the steps that make room, which pad."""
    layer = CondensedLayer(METHODS[name])
    for L in (31, 1):
        read_by(layer, draw_tokens(L))
    started.clear()
    for i in range(5):
        new, before = draw_tokens(1, i), layer._ring.buffers
        with Counting() as counting:
            read_by(layer, new)
        memory = ["aten.empty.memory_format", "aten.split_with_sizes.default"]
        assert counting.names[-5:] == [*memory, *memory, memory[0]]
        if layer._ring.buffers is before:
            assert len(counting.names) == 5
        assert len(started) == 5
        started.clear()


def test_a_prompt_that_needs_longer_buffers_frees_the_shorter_ones():
    layer = CondensedLayer(RECALL)
    for L in (20, 1):
        read_by(layer, draw_tokens(L))
    store = weakref.ref(layer._ring.buffers.store)
    read_by(layer, draw_tokens(4 * room_for(20)))
    assert store() is None


def test_a_trace_gets_one_operation():
    """Subclasses of tensors see the step by name, and none is prepared."""
    layer, seen = CondensedLayer(RECALL), []
    read_by(layer, draw_tokens(20))

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(str(func))
            with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
                return func(*args, **(kwargs or {}))

    q, k, v = draw_tokens(1)
    read_by(layer, (q.as_subclass(Seen), k, v))
    assert "condense.step.default" in seen
    assert layer._ring._prepared is None
