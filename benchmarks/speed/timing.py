"""Timing on a device, and its measured ceilings: FLOP/s of a matrix product, bytes/s of a copy.

On CUDA by `triton.testing.do_bench`: events around each call, caches overwritten in between; calls that take
microseconds are captured in a graph and replayed. On a CPU by `torch.utils.benchmark`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

from condense.evaluate.compare import now

# a call that takes longer than this is measured once
_LONG_S = 3.0
# at most this many samples, because a decode step that is timed reads one more token each time
_MOST = 200


@dataclass(frozen=True)
class Quantiles:
    """Times of single calls, milliseconds: the median, and the 20th and 80th percentile."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Quantiles:
        """Quantiles of single measurements in seconds."""
        samples = torch.tensor(seconds, dtype=torch.float64) * 1e3
        median, p20, p80 = samples.quantile(samples.new_tensor([0.5, 0.2, 0.8])).tolist()
        return cls(median, p20, p80, len(seconds))


@dataclass(frozen=True)
class Ceilings:
    """Rates of this device in this run: of a large matrix product, and of a large copy (reads and writes counted)."""

    matmul_tflops: float
    copy_tbs: float


@dataclass(frozen=True)
class Clock:
    """Times calls on one device within about ``budget_s`` seconds each, beyond the first calls."""

    device: torch.device
    budget_s: float

    @property
    def is_cuda(self) -> bool:
        """True on CUDA, where there are events and graphs."""
        return self.device.type == "cuda"

    def time(self, call: Callable[[], Any], parts: int = 1) -> Quantiles:
        """Times of single calls, divided by ``parts``; the first one (compiling, allocating) is not counted."""
        call()
        start = now(self.device)
        call()
        seconds = [now(self.device) - start]
        if seconds[0] <= _LONG_S:
            seconds = self._on_cuda(call) if self.is_cuda else self._on_cpu(call)
        return Quantiles.of([each / parts for each in seconds])

    def time_rotating(self, calls: Sequence[Callable[[], Any]]) -> Quantiles:
        """Time per call when each has its own inputs, larger together than the caches; one graph on CUDA."""
        if not self.is_cuda:
            return self.time(lambda: [call() for call in calls], len(calls))
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for call in calls:
                call()
        now(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [call() for call in calls]
        times = self.time(graph.replay, len(calls))
        del outputs
        return times

    def ceilings(self, dtype: torch.dtype) -> Ceilings:
        """A square matrix product (8192 on CUDA, 256 on a CPU) in ``dtype`` and a copy of 2 GiB (64 MiB)."""
        n, nbytes = (8192, 2**31) if self.is_cuda else (256, 2**26)
        a, b = (torch.randn(n, n, dtype=dtype, device=self.device) for _ in range(2))
        source = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        matmul, copy = self.time(lambda: a @ b), self.time(lambda: target.copy_(source))
        return Ceilings(2 * n**3 / matmul.median_ms / 1e9, 2 * nbytes / copy.median_ms / 1e9)

    def _on_cuda(self, call: Callable[[], Any]) -> list[float]:
        from triton.testing import do_bench

        with torch.cuda.device(self.device):
            (first,) = do_bench(call, warmup=0, rep=0, return_mode="all")
            span = min(max(1e3 * self.budget_s, 3 * first), _MOST * first)
            return [ms / 1e3 for ms in do_bench(call, warmup=0, rep=span, return_mode="all")]

    def _on_cpu(self, call: Callable[[], Any]) -> list[float]:
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return list(timer.blocked_autorange(min_run_time=self.budget_s).times)
