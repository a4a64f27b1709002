"""A method with coarse entries, and its attention query by query."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

import condense
from condense.methods import ChunkPooling, Layout
from condense.ops import Coarse, UniformRule


@dataclass(frozen=True, kw_only=True)
class TwoScales(condense.Method):
    """Means of chunks, and behind ``near`` tokens means of n of these; kernels make them unless ``own``."""

    name: ClassVar[str] = "two-scales-of-tests"
    chunk: int = 4
    window: int = 7
    delay: int = 0
    n: int = 3
    near: int = 30
    own: bool = False

    @property
    def layout(self):
        pooling = None if self.own else ChunkPooling("mean", "mean")
        coarse = Coarse(self.n, self.near, math.log(self.chunk * self.n))
        rule = UniformRule(self.chunk, self.window)
        return Layout(rule, self.delay, pooling=pooling, bias=(math.log(self.chunk),), coarse=coarse)

    def represent(self, chunks, summary, *, scale, backend):
        k, v = chunks.tokens()
        return k.mean(3), v.mean(3)


METHODS = {
    "made-late": TwoScales(window=4, delay=4, near=12),
    "made-early": TwoScales(),
    "no-window": TwoScales(window=0, near=8, n=2),
    "eight-pairs": TwoScales(chunk=2, n=8, window=5, near=9),
    "own": TwoScales(own=True),
}


def by_hand(method, q, k, v, scale):
    """Output and log-sum-exp of one KV head. q ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``."""
    c, size, outs, lses = method.chunk, method.chunk * method.n, [], []
    for t in range(1, len(k) + 1):
        closed, merged = max(0, t - method.window) // c, max(0, t - method.near) // size
        runs = [(j * size, size) for j in range(merged)]
        runs += [(j * c, c) for j in range(merged * method.n, closed)]
        runs += [(i, 1) for i in range(closed * c, t)]
        assert sum(num for _, num in runs) == t
        keys, values = (torch.stack([x[i : i + num].mean(0) for i, num in runs]) for x in (k, v))
        bias = torch.tensor([math.log(num) for _, num in runs], dtype=torch.float64)
        scores = scale * q[:, t - 1] @ keys.T + bias
        outs.append(scores.softmax(-1) @ values)
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs, 1), torch.stack(lses, 1)
