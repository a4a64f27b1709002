"""The `hopper` backend of Recall's attention over a prompt: forward by a kernel for Hopper.

Triton's kernels choose the groups, and compute gradients.

Shapes as in `condense.ops.triton.recall_attend`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from condense.ops.hopper.attend import attend as attend_sources
from condense.ops.hopper.attend_forward import ROWS, shared_layout
from condense.ops.hopper.recall_attend import PART, RecallForm, recall_fwd_hopper_kernel
from condense.ops.triton.attend_call import not_empty, operation, results
from condense.ops.triton.descriptors import descriptor
from condense.ops.triton.host import LOG2E, cdiv, gpu_of, on_device_of, whole_rows
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_attend import Kernels, attend_recall, recall_backward
from condense.ops.triton.recall_attend_call import RecallCall

_FORWARD = Launcher(recall_fwd_hopper_kernel)
_TILE = 2 * ROWS.value
# keys per block, and blocks of these loaded ahead
_KEYS, _STAGES = 64, 6
# 12 warps start with 168 registers each; the loading warps then give most of theirs to the others
_OPTIONS = {"num_warps": 4, "maxnreg": 168}


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a `RecallCall`."""
    call = RecallCall(*arguments)
    q, (out, lse) = whole_rows(call.q), results(call.q, call.v)
    (B, H, L, D), (K, _), g = q.shape, call.heads, call.group_size
    call = call._replace(groups=call.groups.expand(-1, K, -1, -1).contiguous())
    R = H // K
    Q = _TILE // R
    near = [not_empty([x[0], x[2]]) for x in (call.k, call.v)]
    store = [whole_rows(x[1]) for x in (call.k, call.v)]

    def described(x: Tensor, keys: int) -> TensorDescriptor:
        return descriptor(TensorDescriptor, x, [1, 1, keys, PART.value], layout=shared_layout(PART.value))

    sources = (
        *[described(x[0], _KEYS) for x in near], *[described(x, g) for x in store],
        *[described(x[1], _KEYS) for x in near],
    )  # fmt: skip
    with on_device_of(q):
        for first, stop, opened in call.blocks(Q):
            tiles = cdiv(stop - first, Q)
            _FORWARD(
                (min(tiles * B * K, gpu_of(q.device).multiprocessors), 1, 1),
                (q, *sources, *opened.tensors, q if call.starts is None else call.starts, out, lse),
                (
                    q.stride()[:3], call.level * LOG2E, K, L, first, stop, *opened.numbers, *call.rule,
                    call.scale * LOG2E, tiles, tiles * B * K,
                ),
                (R, D // PART.value, RecallForm(g, _KEYS, _STAGES, call.pool, call.kind)),
                _OPTIONS,
            )  # fmt: skip
    return out, lse


_KERNELS = Kernels(_forward, operation("attend_recall_hopper", RecallCall, _forward, recall_backward), attend_sources)
attend_recall_hopper = partial(attend_recall, kernels=_KERNELS)
