"""The `hopper` backend: attention's forward by the kernel for Hopper, its gradients by Triton's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from condense.ops.hopper.attend_forward import launch
from condense.ops.spans import Source, Spans
from condense.ops.triton.attend import operation
from condense.ops.triton.attend_call import AttendCall, call_of, needs_operation
from condense.ops.triton.host import gpu_of


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = AttendCall(*arguments)
    return launch(call, gpu_of(call.q.device).multiprocessors)


_attend = operation("attend_hopper", _forward)


def attend(
    q: Tensor,
    sources: Sequence[Source],
    spans: Spans,
    *,
    scale: float,
    softcap: float,
    dropout_p: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `condense.ops.attend`."""
    assert dropout_p == softcap == 0, "the backend's limits"
    call = call_of(q, sources, spans, scale)
    out, lse = (_attend if needs_operation(call.q, *call.k, *call.v, *call.biases) else _forward)(*call)
    return out, lse if return_lse else None
