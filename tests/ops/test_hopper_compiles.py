"""The forward kernel for Hopper, compiled for that GPU on a machine without one."""

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from condense.ops.triton import attend as triton_attend

WIDTHS = [widths for widths in triton_attend._HOPPER_WIDTHS if len(set(widths)) > 1]
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
    from condense.ops.hopper.attend_forward import launch_fwd_hopper

    q, k, v = (torch.zeros(1, 2, 128, width, dtype=torch.bfloat16) for width in (D, D, Dv))
    plan = triton_attend._Plan(q, 2, None, [], [16, 64, 1, 8], [0, 0, 0, 0], 0.1, 0.0)
    shared = {name: value for name, value in plan.shared().items() if name not in ("L", "PRECISION")}
    out, lse = triton_attend._results(q, v)
    launch_fwd_hopper(q, [k, v, k, v], out, lse, programs=132, s_bounds=plan.s_bounds, M=8, **shared)
    assert compiled[0].metadata.shared <= SHARED_MEMORY
    assert "wgmma.mma_async" in compiled[0].asm["ptx"]
