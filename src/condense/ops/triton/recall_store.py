"""Recall's store as keys and values, for attention over a prompt: one pass over the bytes of groups where they lie.

Shapes: B rows, K KV heads, n groups of g tokens, P pages of N slots, C bytes of a token, D and Dv widths.
"""

import torch
from torch import Tensor

from condense.ops.recall.index import GroupIndex, rotation
from condense.ops.recall.store import StoreFormat
from condense.ops.step.pages import Places
from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import cdiv, check_programs, on_device_of, power_of_2, whole_rows
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_store_kernels import Form, recall_unpack_kernel

_UNPACK = Launcher(recall_unpack_kernel)


def unpack_store(
    form: StoreFormat, pieces: Tensor, index: GroupIndex, widths: tuple[int, int], dtype: torch.dtype,
    places: Places | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `condense.ops.unpack_store`; for 8 and 4 bits."""
    page, _, slot = (None, None, None) if places is None else places
    k, v = _unpack(pieces, *index, page, slot, form.bits, *widths, dtype)
    return k, v


# a torch operation, which torch.compile keeps whole
@torch.library.custom_op("condense::unpack_store", mutates_args=())
def _unpack(
    pieces: Tensor, signs: Tensor, steps: Tensor, page: Tensor | None, slot: Tensor | None, bits: int, D: int, Dv: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    k, v = _results(pieces, signs, steps, page, slot, bits, D, Dv, dtype)
    pieces, (B, K, tokens, _), g = whole_rows(pieces), k.shape, steps.shape[3] - 1
    check_programs(B * K)
    form = Form.of(StoreFormat(bits, g), dtype, (D, Dv), (*split_width(D), *split_width(Dv or D)))
    # threads read 8 bytes of codes at a time, and write 16 bytes
    T, warps, n = min(16, power_of_2(g)), 4 if bits * D <= 512 else 8, tokens // g
    places = (None if x is None else x.contiguous() for x in (page, slot))
    with on_device_of(pieces):
        _UNPACK(
            (n * cdiv(g, T), B * K, 1),
            (pieces, signs.contiguous(), steps.contiguous(), *places, rotation(D, pieces.device, dtype), k, v),
            (*pieces.stride()[:3], K, n),
            (form, T),
            # `StoreFormat` rounds products of float32 before it adds
            {"num_warps": warps, "enable_fp_fusion": dtype != torch.float32},
        )
    return k, v


@_unpack.register_fake
def _results(
    pieces: Tensor, signs: Tensor, steps: Tensor, page: Tensor | None, slot: Tensor | None, bits: int, D: int, Dv: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (B, K, n, columns) = steps.shape
    k, v = (pieces.new_empty(B, K, n * (columns - 1), width, dtype=dtype) for width in (D, Dv))
    return k, v
