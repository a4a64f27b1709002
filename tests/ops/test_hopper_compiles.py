"""The forward kernel for Hopper, compiled for that GPU on a machine without one."""

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from condense.ops import RuleSpans, Source, UniformRule
from condense.ops.hopper import limits
from condense.ops.triton.attend_call import call_of

WIDTHS = [widths for widths in limits.WIDTHS if len(set(widths)) > 1]
SHARED_MEMORY = 227 * 1024


class Hopper:
    """What Triton asks of a driver up to the launch."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that calls would have launched."""
    kernels, run = [], JITFunction.run
    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kw: kernels.append(run(*args, **kw | {"warmup": True})))
    return kernels


@pytest.mark.parametrize(("D", "Dv"), WIDTHS)
def test_two_part_keys_fit_into_shared_memory(D, Dv, compiled):
    from condense.ops.hopper.attend_forward import launch

    q, k, v = (torch.zeros(1, 2, 128, width, dtype=torch.bfloat16) for width in (D, D, Dv))
    launch(call_of(q, [Source(k, v), Source(k, v)], RuleSpans(UniformRule(16, 64, max_chunks=8), 0, 0), 0.1), 132)
    assert compiled[0].metadata.shared <= SHARED_MEMORY
    assert "wgmma.mma_async" in compiled[0].asm["ptx"]
