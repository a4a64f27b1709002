"""Rows of one decode step, timed in turn over several caches that together are larger than the L2 cache.

Shapes: B rows, H query heads, K KV heads, L tokens, D and Dv widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from condense.bench import gate
from condense.bench.baselines import dense_step
from condense.bench.problems import Setting, step_bytes
from condense.bench.tasks import Task, Work
from condense.caches import CondensedLayer, StaticCondensedLayer, read_request
from condense.methods import Dense, Method
from condense.testing.budget import Verdict

MIN_CACHES = 8
# room for one token per timed replay: more than the clock makes
_ROOM = 512


def baseline_step_task(setting: Setting, length: int, name: str) -> Task:
    """One decode step of a dense baseline over the full cache, the newest token already in it."""

    def prepare() -> Work:
        heads, scale = setting.shape, float(setting.shape.width**-0.5)
        attend = dense_step(name, heads.num_q, heads.num_kv, scale)
        first = setting.step(Dense(), length, 0)
        nbytes = step_bytes(*first)
        steps = [first, *(setting.step(Dense(), length, i) for i in range(1, _num_caches(setting.device, nbytes)))]
        return Work([_bound(attend, q, s.window.k, s.window.v) for q, s in steps], nbytes=nbytes)

    return Task("decode", name, None, False, length, prepare)


def step_task(setting: Setting, length: int, label: str, method: Method) -> Task:
    """One decode step of a condensed layer: store the token, pool a group that is due, attend."""
    return Task("decode", label, method, True, length, lambda: _over_layers(setting, length, method))


def _over_layers(setting: Setting, length: int, method: Method) -> Work:
    """Static layers; the first has read ``length`` tokens, the others hold random numbers."""
    scale = float(setting.shape.width**-0.5)
    q, k, v = setting.inputs(length + 1)
    layer, growing = StaticCondensedLayer(method, length + _ROOM), CondensedLayer(method)
    for cache in (layer, growing):
        cache.read(k[:, :, :-1], v[:, :, :-1], read_request(q[:, :, :-1], scale=scale))
    q, k, v = (x[:, :, -1:].clone() for x in (q, k, v))
    sources = growing.read(k, v, read_request(q, scale=scale))
    nbytes = step_bytes(q, sources)
    layers = [layer]
    for draw in range(1, _num_caches(setting.device, nbytes)):
        other = StaticCondensedLayer(method, length + _ROOM)
        other.lazy_initialization(k, v)
        generator = torch.Generator(setting.device).manual_seed(setting.seed * 1000 + draw)
        assert other.buffers is not None
        for buffer in other.buffers:
            if buffer.is_floating_point():
                buffer.normal_(generator=generator)
        other.buffers.seen.fill_(length)
        other.num_slots.fill_(length)
        other.know_slots(length)
        layers.append(other)

    def check() -> Verdict:
        return gate.check_output(layer.step(q, k, v, scale=scale), q, sources, scale=scale)

    return Work([_bound(other.step, q, k, v, scale=scale) for other in layers], check, nbytes=nbytes)


def _num_caches(device: torch.device, nbytes: int) -> int:
    """Number of caches of ``nbytes`` each that fill the L2 cache three times."""
    if device.type != "cuda":
        return MIN_CACHES
    return max(MIN_CACHES, math.ceil(3 * torch.cuda.get_device_properties(device).L2_cache_size / nbytes))


def _bound(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Callable[[], Any]:
    return lambda: call(*arguments, **keywords)
