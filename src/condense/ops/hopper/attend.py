"""The `hopper` backend: attention's forward by the kernel for Hopper, its gradients by Triton's kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from condense.ops.hopper.attend_forward import launch
from condense.ops.triton.attend import attend_backward, attend_by
from condense.ops.triton.attend_call import AttendCall, operation
from condense.ops.triton.host import gpu_of


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = AttendCall(*arguments)
    assert call.softcap == 0, "the backend's limits"
    return launch(call, gpu_of(call.q.device).multiprocessors)


attend = attend_by(operation("attend_hopper", AttendCall, _forward, attend_backward), _forward)
