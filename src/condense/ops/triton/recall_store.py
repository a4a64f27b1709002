"""Recall's store over a prompt: pack all groups with one kernel, and unpack them to keys and values with another.

Shapes: B rows, K KV heads, n groups of g tokens, P pages of N slots, C bytes of a token, D and Dv widths.
"""

from typing import Any

import torch
from torch import Tensor

from condense.ops.recall.index import GroupIndex, index_widths, rotation
from condense.ops.recall.store import StoreFormat
from condense.ops.step.pages import Places
from condense.ops.triton.host import cdiv, check_programs, on_device_of, power_of_2, whole_rows
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_close_kernels import close_options, recall_close_kernel
from condense.ops.triton.recall_store_kernels import Form, recall_unpack_kernel

_CLOSE, _UNPACK = Launcher(recall_close_kernel), Launcher(recall_unpack_kernel)


def store_groups(form: StoreFormat, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pack groups into an index and a store of 8 or 4 bits, see `condense.ops.backends.Operations`."""
    return _store(k, v, form.bits)


@torch.library.custom_op("condense::store_groups", mutates_args=())
def _store(k: Tensor, v: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    signs, steps, store = made = _stored(k, v, bits)
    (B, K, G, g, D), Dv = k.shape, v.shape[4]
    form = Form.of(StoreFormat(bits, g), k.dtype, (D, Dv))
    # each group becomes a row of the kernel, whose ring holds g tokens and whose new token, the last, closes the group
    rows, like = B * K * G, (k.contiguous(), v.contiguous())
    last = [x.view(rows, g, x.shape[4])[:, -1] for x in like]
    strides = [n for x in last for n in (x.stride(0), 0)]
    with on_device_of(k):
        if rows > 0:
            _CLOSE(
                (rows, 3, 1),
                (
                    *last, signs, steps, store, *like, None,
                    torch.full((rows,), g - 1, dtype=torch.int32, device=k.device), k, None, None, None, None,
                    rotation(D, k.device, k.dtype),
                ),
                (*strides, 1, 1, g, g, 0, 0),
                (form, False, False, None, None), close_options(D, in_step=False),
            )  # fmt: skip
    return made


@_store.register_fake
def _stored(k: Tensor, v: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    (B, K, G, g, D), Dv = k.shape, v.shape[4]
    of_signs, of_steps = index_widths(g, D)
    row = StoreFormat(bits, g).width(D, Dv, k.itemsize)
    return (
        k.new_empty(B, K, G, of_signs, dtype=torch.uint8),
        k.new_empty(B, K, G, of_steps),
        k.new_empty(B, K, G * g, row, dtype=torch.uint8),
    )


def unpack_store(
    form: StoreFormat, pieces: Tensor, index: GroupIndex, widths: tuple[int, int], dtype: torch.dtype,
    places: Places | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys and values of a store, see `condense.ops.unpack_store`."""
    page, _, slot = (None, None, None) if places is None else places
    # the operation is used only where it is needed: calling it takes the host longer than starting the kernel
    keeps_whole = torch.compiler.is_compiling() or torch.is_grad_enabled()
    return (_unpack if keeps_whole else _start)(pieces, *index, page, slot, form.bits, *widths, dtype)


def _start(
    pieces: Tensor, signs: Tensor, steps: Tensor, page: Tensor | None, slot: Tensor | None, bits: int, D: int, Dv: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    k, v = _results(pieces, signs, steps, D, Dv, dtype)
    # pieces may be in pinned host memory, so they are not the first tensor, whose device `Launcher` takes
    pieces, (B, K, tokens, _), g, device = whole_rows(pieces), k.shape, steps.shape[3] - 1, steps.device
    check_programs(B * K)
    form = Form.of(StoreFormat(bits, g), dtype, (D, Dv))
    # threads read 8 bytes of codes at a time, and write 16 bytes
    T, warps, n = min(16, power_of_2(g)), 4 if bits * D <= 512 else 8, tokens // g
    # 128 tokens per tile share one load of the rotation. Not in float32, which tensor cores do not multiply exactly: a
    # tile's products are then unrolled, and large tiles take minutes to compile
    BG = 128 // T if max(D, Dv) <= 128 and dtype != torch.float32 else 1
    places = (None if x is None else x.contiguous() for x in (page, slot))
    with on_device_of(steps):
        _UNPACK(
            (cdiv(n, BG) * cdiv(g, T), B * K, 1),
            (signs.contiguous(), steps.contiguous(), pieces, *places, rotation(D, device, dtype), k, v),
            (*pieces.stride()[:3], K, n),
            (form, T, BG),
            # `StoreFormat` rounds products of float32 before it adds
            {"num_warps": warps, "enable_fp_fusion": dtype != torch.float32},
        )
    return k, v


# `_start` as a torch operation, into which torch.compile does not trace
_unpack = torch.library.custom_op("condense::unpack_store", _start, mutates_args=())


@_unpack.register_fake
def _results(pieces: Tensor, signs: Tensor, steps: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, D, Dv, dtype = others
    (B, K, n, columns) = steps.shape
    k, v = (steps.new_empty(B, K, n * (columns - 1), width, dtype=dtype) for width in (D, Dv))
    return k, v
