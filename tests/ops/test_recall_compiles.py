"""The kernels of Recall's decode step, compiled for Hopper on a machine without one."""

import pytest
import torch
from ops.test_hopper_compiles import SHARED_MEMORY, compiled  # noqa: F401
from ops.test_recall_step import empty_state

from condense.ops.recall import IndexSettings, RecallSettings, limits
from condense.ops.spans import UniformRule
from condense.ops.triton import host
from condense.ops.triton import recall_step as triton_step


@pytest.mark.parametrize(("bits", "slots"), [(8, 0), (4, 16)])
def test_the_index_is_multiplied_in_halves(bits, slots, compiled, monkeypatch):  # noqa: F811
    """Codes become float16 two at a time, which the interpreter does not do, and tensor cores multiply them."""
    table = triton_step._table
    monkeypatch.setattr(triton_step, "_table", lambda device, *args: table(torch.device("cuda"), *args))
    monkeypatch.setattr(triton_step, "gpu_of", lambda device: host.Gpu((9, 0), 132))
    monkeypatch.setattr(limits, "absence", lambda device: None)
    settings = RecallSettings(UniformRule(16, 64), IndexSettings("bounds", 16, 8, bits), 8, 0.0)
    state = empty_state(settings, 1024, 2, rows=1, widths=(128, 128), dtype=torch.bfloat16, slots=slots)
    q, k, v = (torch.zeros(1, heads, 1, 128, dtype=torch.bfloat16) for heads in (8, 2, 2))
    triton_step._plan.cache_clear()
    triton_step.recall_step(q, k, v, state, settings, scale=0.1)
    triton_step._plan.cache_clear()
    score = compiled[1]
    assert "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16" in score.asm["ptx"]
    assert "sub.rn.f16x2" in score.asm["ptx"]
    assert len(compiled) == 6
    assert all(kernel.metadata.shared <= SHARED_MEMORY for kernel in compiled)
