"""Timing on a device, and the ceilings that everything is measured against.

On CUDA: events around each call, all queued before anything is waited for, with caches overwritten in between, which
also gives the host a lead. Calls that take microseconds are captured in a graph and replayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# more than the second-level cache of any device at hand
_SCRATCH_BYTES = 256 * 2**20
# one call of more than this, after the first, is measured once
_LONG_S = 3.0


@dataclass(frozen=True)
class Times:
    """Quantiles of single calls, milliseconds."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """From single measurements in seconds."""
        samples = torch.tensor(seconds, dtype=torch.float64) * 1e3
        median, p20, p80 = samples.quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)).tolist()
        return cls(median, p20, p80, len(seconds))


@dataclass(frozen=True)
class Ceilings:
    """What this device did in this run: a large matrix product and a large copy (read and write both counted)."""

    matmul_tflops: float
    copy_tbs: float


class Clock:
    """Times calls on one device within ``budget_s`` seconds each, beyond the first call and one more."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device = device
        self.budget_s = budget_s
        self._scratch = torch.empty(_SCRATCH_BYTES if self.is_cuda else 0, dtype=torch.uint8, device=device)

    @property
    def is_cuda(self) -> bool:
        """Events, graphs and memory figures exist there only."""
        return self.device.type == "cuda"

    def time(self, call: Callable[[], Any]) -> Times:
        """Each call by itself; the first one (compilation, plans) is not counted."""
        call()
        self.synchronize()
        if self.is_cuda:
            return self._repeat(lambda: self._event(call), 1, at_most=200)
        return self._repeat(lambda: _wall(call), 1, at_most=50)

    def time_rotating(self, calls: Sequence[Callable[[], Any]]) -> Times:
        """Time per call when each has its own inputs, larger together than the caches; one graph on CUDA."""
        if not self.is_cuda:
            for call in calls:
                call()
            return self._repeat(lambda: _wall(lambda: [call() for call in calls]), len(calls), at_most=50)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [call() for call in calls]
        graph.replay()
        times = self._repeat(lambda: self._event(graph.replay), len(calls), at_most=200)
        del outputs
        return times

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """Device memory that a call needs at its peak, beyond what was there before; None on a CPU."""
        if not self.is_cuda:
            return None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def synchronize(self) -> None:
        """Wait for all queued work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def ceilings(self, dtype: torch.dtype) -> Ceilings:
        """A square matrix product (8192 on CUDA, 1024 on a CPU) in ``dtype`` and a copy of 2 GiB (64 MiB)."""
        n, nbytes = (8192, 2**31) if self.is_cuda else (1024, 2**26)
        a, b = (torch.randn(n, n, dtype=dtype, device=self.device) for _ in range(2))
        matmul = self.time(lambda: a @ b)
        source = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy = self.time(lambda: target.copy_(source))
        return Ceilings(2 * n**3 / matmul.median_ms / 1e9, 2 * nbytes / copy.median_ms / 1e9)

    def _repeat(self, sample: Callable[[], Callable[[], float]], calls: int, at_most: int) -> Times:
        """Samples are queued and read at the end, so that the device never waits for the host."""
        read = sample()
        self.synchronize()
        first = read()
        if first > _LONG_S:
            return Times.of([first / calls])
        runs = max(3, min(at_most, int(self.budget_s / max(first, 1e-7))))
        reads = [sample() for _ in range(runs)]
        self.synchronize()
        return Times.of([read() / calls for read in reads])

    def _event(self, call: Callable[[], Any]) -> Callable[[], float]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._scratch.zero_()
        start.record()
        call()
        stop.record()
        return lambda: start.elapsed_time(stop) / 1e3


def _wall(call: Callable[[], Any]) -> Callable[[], float]:
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return lambda: seconds
