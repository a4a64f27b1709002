"""Recall's attention over a prompt by the kernel for Hopper: forward of a call in which queries open groups.

Shapes as in `condense.ops.triton.recall_attend`.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from condense.ops.hopper.attend_forward import shared_layout
from condense.ops.hopper.pipeline import OPTIONS, ROWS
from condense.ops.hopper.recall_attend import PART, RecallForm, recall_fwd_hopper_kernel
from condense.ops.triton.attend_call import AttendCall, not_empty, results
from condense.ops.triton.descriptors import descriptor
from condense.ops.triton.host import LOG2E, cdiv, on_device_of, whole_rows
from condense.ops.triton.launch import Launcher

_FORWARD = Launcher(recall_fwd_hopper_kernel)
_TILE = 2 * ROWS.value
# keys per block, and blocks of these loaded ahead
_KEYS, _STAGES = 64, 6


def launch_opened(call: AttendCall, programs: int) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a call in which queries open groups; programs: most to start."""
    assert call.groups is not None, "queries open groups"
    q, (out, lse) = whole_rows(call.q), results(call.q, call.v)
    (B, H, L, D), K, g = q.shape, call.k[0].shape[1], call.group_size
    call = call._replace(groups=call.groups.expand(-1, K, -1, -1).contiguous())
    R = H // K
    Q = _TILE // R
    near = [not_empty(x[:2]) for x in (call.k, call.v)]
    store = [whole_rows(x[2]) for x in (call.k, call.v)]

    def described(x: Tensor, keys: int) -> TensorDescriptor:
        return descriptor(TensorDescriptor, x, [1, 1, keys, PART.value], layout=shared_layout(PART.value))

    sources = (
        *[described(x[0], _KEYS) for x in near], *[described(x, g) for x in store],
        *[described(x[1], _KEYS) for x in near],
    )  # fmt: skip
    with on_device_of(q):
        for first, stop, lists in call.blocks(Q):
            assert lists is not None, "queries open groups"
            tiles = cdiv(stop - first, Q)
            _FORWARD(
                (min(tiles * B * K, programs), 1, 1),
                (q, *sources, *lists.tensors, q if call.spans is None else call.spans, out, lse),
                (
                    q.stride()[:3], call.levels[0] * LOG2E, K, L, first, stop, *lists.numbers, *call.rule,
                    call.scale * LOG2E, tiles, tiles * B * K,
                ),
                (R, D // PART.value, RecallForm(g, _KEYS, _STAGES, call.pool, call.kind)),
                OPTIONS,
            )  # fmt: skip
    return out, lse
