"""Recall's store in kernels: a group is quantised when it closes, if the store has fewer than 16 bits, and read as
numbers by attention.

`condense.ops.recall.StoreFormat` says what a group's piece of bytes holds, and defines every number here.

Shapes: T tokens of a tile, P columns of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from condense.ops.triton.device.address import token_rows
from condense.ops.triton.device.codes import codes_of, to_numbers, unpacked
from condense.ops.triton.device.parts import parts, tile_width


class Form(NamedTuple):
    """The constants of a store.

    bits: per number. g: tokens per group. D, DV: widths of keys and of values; DV is 0 for latents. D0, D1, V0, V1:
    widths of their parts (`condense.ops.triton.device.parts`); V0 is D0 for latents. piece: elements of a group's
    piece, numbers for 16 bits and bytes for fewer. unit: `StoreFormat.step_unit`. tiny: the smallest step.
    """

    bits: int
    g: int
    D: int
    DV: int
    D0: int
    D1: int
    V0: int
    V1: int
    piece: int
    unit: float
    tiny: float


@triton.constexpr_function
def _tile(g):
    """Tokens that are quantised at a time."""
    return min(16, triton.next_power_of_2(g))


@triton.jit
def chunk_tokens(
    tokens, position, t, inside, LO: tl.constexpr, D: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr
):  # fmt: skip
    """Columns from LO on of `Tokens` at ``position``, ``[n, P]`` float32; the newest, at t, is not in its row yet."""
    d = LO + tl.arange(0, P)
    there = inside[:, None] & (d < D)[None, :]
    at = token_rows(tokens.place, position, inside, D, NEAR)[:, None] + d[None, :]
    older = tl.load(tokens.rows + at, mask=there & (position < t)[:, None], other=0.0)
    new = tl.load(tokens.new + d, mask=d < D, other=0.0)
    return tl.where((position == t)[:, None], new[None, :], older).to(tl.float32)


@triton.jit
def _step(zero, largest, dtype: tl.constexpr, FORM: tl.constexpr):
    """Step of a grid from ``zero`` to ``largest``, rounded to the dtype in which it is stored, in float32."""
    return tl.maximum(((largest - zero) * FORM.unit).to(dtype).to(tl.float32), FORM.tiny)


@triton.jit
def put_keys(tokens, piece_ptr, first, t, FORM: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr):
    """Quantise and write the keys of the group that begins at position ``first``. P: columns of a tile of bytes."""
    PARTS: tl.constexpr = 8 // FORM.bits
    C: tl.constexpr = FORM.D // PARTS
    T: tl.constexpr = _tile(FORM.g)
    dtype: tl.constexpr = tokens.rows.dtype.element_ty
    numbers, codes_ptr = piece_ptr.to(tl.pointer_type(dtype)), _codes_of_keys(piece_ptr, dtype, FORM)
    c, i = tl.arange(0, P), tl.arange(0, T)
    steps, zeros = (), ()
    for part in tl.static_range(PARTS):
        zero = tl.full([P], float("inf"), tl.float32)
        largest = tl.full([P], float("-inf"), tl.float32)
        for start in range(0, FORM.g, T):
            inside = start + i < FORM.g
            x = chunk_tokens(tokens, first + start + i, t, inside, part * C, FORM.D, P, NEAR)
            zero = tl.minimum(zero, tl.min(tl.where(inside[:, None], x, float("inf")), 0))
            largest = tl.maximum(largest, tl.max(tl.where(inside[:, None], x, float("-inf")), 0))
        step = _step(zero, largest, dtype, FORM)
        tl.store(numbers + part * C + c, step.to(dtype), mask=c < C)
        tl.store(numbers + FORM.D + part * C + c, zero.to(dtype), mask=c < C)
        steps, zeros = steps + (step,), zeros + (zero,)  # noqa: RUF005
    for start in range(0, FORM.g, T):
        inside = start + i < FORM.g
        codes = tl.zeros([T, P], tl.int32)
        for part in tl.static_range(PARTS):
            x = chunk_tokens(tokens, first + start + i, t, inside, part * C, FORM.D, P, NEAR)
            codes += codes_of(x, steps[part][None, :], zeros[part][None, :], FORM.bits) << (part * FORM.bits)
        at = (start + i)[:, None] * C + c[None, :]
        tl.store(codes_ptr + at, codes.to(tl.uint8), mask=inside[:, None] & (c < C)[None, :])


@triton.jit
def put_values(tokens, piece_ptr, first, t, FORM: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr):
    """Quantise and write the values of the group that begins at position ``first``; P as in `put_keys`."""
    PARTS: tl.constexpr = 8 // FORM.bits
    C: tl.constexpr = FORM.DV // PARTS
    T: tl.constexpr = _tile(FORM.g)
    dtype: tl.constexpr = tokens.rows.dtype.element_ty
    numbers, codes_ptr = piece_ptr.to(tl.pointer_type(dtype)) + 2 * FORM.D, _codes_of_values(piece_ptr, dtype, FORM)
    c = tl.arange(0, P)
    is_column = (c < C)[None, :]
    for start in range(0, FORM.g, T):
        i = start + tl.arange(0, T)
        inside = i < FORM.g
        zero = tl.full([T], float("inf"), tl.float32)
        largest = tl.full([T], float("-inf"), tl.float32)
        for part in tl.static_range(PARTS):
            x = chunk_tokens(tokens, first + i, t, inside, part * C, FORM.DV, P, NEAR)
            zero = tl.minimum(zero, tl.min(tl.where(is_column, x, float("inf")), 1))
            largest = tl.maximum(largest, tl.max(tl.where(is_column, x, float("-inf")), 1))
        step = _step(zero, largest, dtype, FORM)
        tl.store(numbers + i, step.to(dtype), mask=inside)
        tl.store(numbers + FORM.g + i, zero.to(dtype), mask=inside)
        codes = tl.zeros([T, P], tl.int32)
        for part in tl.static_range(PARTS):
            x = chunk_tokens(tokens, first + i, t, inside, part * C, FORM.DV, P, NEAR)
            codes += codes_of(x, step[:, None], zero[:, None], FORM.bits) << (part * FORM.bits)
        tl.store(codes_ptr + i[:, None] * C + c[None, :], codes.to(tl.uint8), mask=inside[:, None] & is_column)


@triton.jit
def _codes_of_keys(piece_ptr, dtype: tl.constexpr, FORM: tl.constexpr):
    of_values: tl.constexpr = FORM.g if FORM.DV > 0 else 0
    return piece_ptr + 2 * (FORM.D + of_values) * (dtype.primitive_bitwidth // 8)


@triton.jit
def _codes_of_values(piece_ptr, dtype: tl.constexpr, FORM: tl.constexpr):
    return _codes_of_keys(piece_ptr, dtype, FORM) + FORM.g * FORM.D * FORM.bits // 8


@triton.jit
def _copied(ptr, copy_ptr, there, copies, COPY: tl.constexpr):
    """Load from ``ptr``. COPY: also store it at ``copy_ptr``, if ``copies``."""
    x = tl.load(ptr, mask=there, other=0)
    if COPY:
        tl.store(copy_ptr, x, mask=there & copies)
    return x


@triton.jit
def _load_codes(ptr, copy_ptr, i, there, copies, d, WIDTH: tl.constexpr, FORM: tl.constexpr, COPY: tl.constexpr):
    """Codes of columns d of tokens i, float32, of vectors WIDTH wide; COPY as in `_copied`."""
    C: tl.constexpr = WIDTH * FORM.bits // 8
    at = i[:, None] * C + (d % C)[None, :]
    codes = tl.load(ptr + at, mask=there, other=0)
    if COPY:
        tl.store(copy_ptr + at, codes, mask=there & (d < C)[None, :] & copies)
    return unpacked(codes, d, C, FORM.bits)


@triton.jit
def _load_keys(
    piece_ptr, copy_ptr, i, copies, dtype: tl.constexpr, FORM: tl.constexpr, COPY: tl.constexpr,
    LO: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Load columns ``[LO, LO + N)`` of the keys of tokens i; 0 past the last column, finite past the last token."""
    d = LO + tl.arange(0, tile_width(N))
    is_column = d < LO + N
    there = (i < FORM.g)[:, None] & is_column[None, :]
    if FORM.bits == 16:
        at = i[:, None] * (FORM.D + FORM.DV) + d[None, :]
        return _copied(piece_ptr + at, copy_ptr + at, there, copies, COPY)
    else:
        numbers, copied = piece_ptr.to(tl.pointer_type(dtype)) + d, copy_ptr.to(tl.pointer_type(dtype)) + d
        step = _copied(numbers, copied, is_column, copies, COPY).to(tl.float32)
        zero = _copied(numbers + FORM.D, copied + FORM.D, is_column, copies, COPY).to(tl.float32)
        codes_ptr, codes_copy = _codes_of_keys(piece_ptr, dtype, FORM), _codes_of_keys(copy_ptr, dtype, FORM)
        codes = _load_codes(codes_ptr, codes_copy, i, there, copies, d, FORM.D, FORM, COPY)
        return to_numbers(zero[None, :] + step[None, :] * codes, dtype)


@triton.jit
def _load_values(
    piece_ptr, copy_ptr, i, copies, dtype: tl.constexpr, FORM: tl.constexpr, COPY: tl.constexpr,
    LO: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """As `_load_keys`, for values."""
    d, inside = LO + tl.arange(0, tile_width(N)), i < FORM.g
    there = inside[:, None] & (d < LO + N)[None, :]
    if FORM.bits == 16:
        at = i[:, None] * (FORM.D + FORM.DV) + FORM.D + d[None, :]
        return _copied(piece_ptr + at, copy_ptr + at, there, copies, COPY)
    else:
        at = 2 * FORM.D + i
        numbers, copied = piece_ptr.to(tl.pointer_type(dtype)) + at, copy_ptr.to(tl.pointer_type(dtype)) + at
        step = _copied(numbers, copied, inside, copies, COPY).to(tl.float32)
        zero = _copied(numbers + FORM.g, copied + FORM.g, inside, copies, COPY).to(tl.float32)
        codes_ptr, codes_copy = _codes_of_values(piece_ptr, dtype, FORM), _codes_of_values(copy_ptr, dtype, FORM)
        codes = _load_codes(codes_ptr, codes_copy, i, there, copies, d, FORM.DV, FORM, COPY)
        return to_numbers(zero[:, None] + step[:, None] * codes, dtype)


@triton.jit
def load_group(piece_ptr, copy_ptr, i, copies, dtype: tl.constexpr, FORM: tl.constexpr, COPY: tl.constexpr):
    """Load keys and values of tokens i of a group, in parts, as `StoreFormat` rounds them; finite past the group's end.

    Values of latents are the first part of their keys. COPY: also store what is read in the piece at ``copy_ptr``, if
    ``copies``.
    """
    k = _load_keys(piece_ptr, copy_ptr, i, copies, dtype, FORM, COPY, 0, FORM.D0)
    if FORM.D1 > 0:
        k = parts(k, _load_keys(piece_ptr, copy_ptr, i, copies, dtype, FORM, COPY, FORM.D0, FORM.D1))
    else:
        k = parts(k, None)
    if FORM.DV == 0:
        return k, (k[0],)
    else:
        v = _load_values(piece_ptr, copy_ptr, i, copies, dtype, FORM, COPY, 0, FORM.V0)
        if FORM.V1 > 0:
            v = parts(v, _load_values(piece_ptr, copy_ptr, i, copies, dtype, FORM, COPY, FORM.V0, FORM.V1))
        else:
            v = parts(v, None)
        return k, v
