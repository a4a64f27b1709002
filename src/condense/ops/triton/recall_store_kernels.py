"""Recall's store in kernels: quantize the tokens of a group when it closes, if the store has fewer than 16 bits, and
load them as numbers for attention.

A group is one piece of bytes, whose layout and numbers `condense.ops.recall.StoreFormat` defines.

Shapes: n groups of a tile, T tokens of each, P columns of a tile.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from condense.ops.recall.index import CENTRE_LEVELS
from condense.ops.recall.store import StoreFormat
from condense.ops.tensors.codes import step_unit
from condense.ops.triton.device import codes as coding
from condense.ops.triton.device.address import token_rows
from condense.ops.triton.device.codes import MIDDLE
from condense.ops.triton.device.parts import key_value_parts, parts, store_rows, tile_width
from condense.ops.triton.device.signs import ROUNDING, block_width, index_widths, rotated_part, sign_bytes

_CENTRE = tl.constexpr(CENTRE_LEVELS)


class Form(NamedTuple):
    """The constants of a store.

    bits: per number. g: tokens per group. D, DV: widths of keys and of values; DV is 0 for latents. D0, D1, V0, V1:
    widths of their parts (`condense.ops.triton.device.parts`); V0 is D0 for latents. piece: elements of a group's
    piece, numbers for 16 bits and bytes for fewer. steps_at, keys_at, values_at: offsets in bytes of the quantization
    steps of keys, the codes of keys and the codes of values. unit: step of values as a fraction of their spread.
    key_unit: `StoreFormat.key_unit`. tiny: the smallest step of values.
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
    steps_at: int
    keys_at: int
    values_at: int
    unit: float
    key_unit: float
    tiny: float

    @classmethod
    def of(cls, form: StoreFormat, dtype: torch.dtype, widths: tuple[int, int], latent: int = 0) -> Form:
        """Return the constants for tokens of a dtype, of widths D and Dv. latent: as in `key_value_parts`."""
        piece, codes_at = form.group_size * form.width(*widths, dtype.itemsize), form.codes_at(*widths, dtype.itemsize)
        parts = key_value_parts(widths[0], widths[1] or widths[0], latent)
        return cls(
            form.bits, form.group_size, *widths, *parts, piece, form.key_steps_at(widths[1], dtype.itemsize), *codes_at,
            step_unit(form.bits, dtype), form.key_unit(dtype), torch.finfo(dtype).tiny,
        )  # fmt: skip


class Pieces(namedtuple("Pieces", "ptr slot moves signs steps")):
    """The pieces of n groups. ptr: pointers to them. slot: pointers to their slots on the device. moves: whether bytes
    that are read from a piece are also copied to its slot. signs, steps: pointers to each group's index.
    """


class Words(namedtuple("Words", "k v unit step zero")):
    """N tokens of groups as `load_words` reads them, keys minus the centres of their groups.

    k, v: codes from `signed_codes` and `middle_codes`, in the parts of `condense.ops.triton.device.codes.to_words`.
    unit: a key is ``unit * k``. step, zero: a value is ``zero + step * (v + MIDDLE)``. All three float32 ``[N]``.
    """


@triton.jit
def chunk_tokens(tokens, position, t, inside, LO, D: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr):
    """Columns from LO on of `Tokens` at ``position``, float32 ``[n, P]``; that at t is read from ``tokens.new``."""
    d = LO + tl.arange(0, P)
    there = inside[:, None] & (d < D)[None, :]
    at = token_rows(tokens.place, position, inside, D, NEAR)[:, None] + d[None, :]
    older = tl.load(tokens.rows + at, mask=there & (position < t)[:, None], other=0.0)
    new = tl.load(tokens.new + d, mask=d < D, other=0.0)
    return tl.where((position == t)[:, None], new[None, :], older).to(tl.float32)


@triton.jit
def _step(zero, largest, dtype: tl.constexpr, FORM: tl.constexpr):
    """Quantization step for numbers from ``zero`` to ``largest``, rounded to ``dtype`` as it is stored, in float32."""
    return tl.maximum(((largest - zero) * FORM.unit).to(dtype).to(tl.float32), FORM.tiny)


@triton.jit
def key_step(largest, dtype: tl.constexpr, FORM: tl.constexpr):
    """Quantization steps of keys, in ``dtype``. largest: size of a rotated key's largest difference from its centre."""
    return (largest * (1 / block_width(FORM.D)) * FORM.key_unit).to(dtype)


@triton.jit
def key_codes(size, step, FORM: tl.constexpr):
    """Codes of keys, float32, from the sizes of rotated keys' differences from their centre. step: from `key_step`.

    Divides once per key, not per number: it multiplies by the inverse and rounds, then subtracts 1 where the rounded
    code is above the exact quotient, so the code is its floor.
    """
    size *= 1 / block_width(FORM.D)
    apart = tl.maximum(2 * step.to(tl.float32), 2.0**-126)[:, None]
    codes = tl.minimum((size * tl.div_rn(1.0, apart) + ROUNDING) - ROUNDING, 2.0**FORM.bits - 1)
    return codes - tl.where(size < codes * apart, 1.0, 0.0)


@triton.constexpr_function
def _room(g):
    """More bytes than a piece can leave empty: lcm(16, g) rounded up to a power of two."""
    return triton.next_power_of_2(math.lcm(16, g))


@triton.jit
def fill_up(piece_ptr, SIZE: tl.constexpr, FORM: tl.constexpr):
    """Write zeros to the unused bytes of a piece, so that equal tokens have equal bytes. SIZE: bytes of a step."""
    n = tl.arange(0, _room(FORM.g))
    after_grid = FORM.steps_at + FORM.g * SIZE + n
    after_codes = FORM.values_at + FORM.g * FORM.DV * FORM.bits // 8 + n
    tl.store(piece_ptr + after_grid, 0, mask=after_grid < FORM.keys_at)
    tl.store(piece_ptr + after_codes, 0, mask=after_codes < FORM.piece)


@triton.jit
def put_values(tokens, piece_ptr, first, t, FORM: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr):
    """Quantize and write the values of the group that begins at position ``first``. P: columns of a tile of bytes."""
    PARTS: tl.constexpr = 8 // FORM.bits
    C: tl.constexpr = FORM.DV // PARTS
    T: tl.constexpr = tokens_of_tile(FORM.g, 16)
    dtype: tl.constexpr = tokens.rows.dtype.element_ty
    numbers, codes_ptr = piece_ptr.to(tl.pointer_type(dtype)), piece_ptr + FORM.values_at
    c = tl.arange(0, P)
    is_column = (c < C)[None, :]
    for start in range(0, FORM.g, T):
        i = start + tl.arange(0, T)
        inside = i < FORM.g
        zero = tl.full([T], float("inf"), tl.float32)
        largest = tl.full([T], float("-inf"), tl.float32)
        for part in tl.static_range(PARTS):
            x = chunk_tokens(tokens, first + i, t, inside, part * C, FORM.DV, P, NEAR)  # [T, P]
            zero = tl.minimum(zero, tl.min(tl.where(is_column, x, float("inf")), 1))
            largest = tl.maximum(largest, tl.max(tl.where(is_column, x, float("-inf")), 1))
        step = _step(zero, largest, dtype, FORM)  # [T]
        tl.store(numbers + i, step.to(dtype), mask=inside)
        tl.store(numbers + FORM.g + i, zero.to(dtype), mask=inside)
        codes = tl.zeros([T, P], tl.int32)
        for part in tl.static_range(PARTS):
            x = chunk_tokens(tokens, first + i, t, inside, part * C, FORM.DV, P, NEAR)
            codes += coding.codes_of(x, step[:, None], zero[:, None], FORM.bits) << (part * FORM.bits)
        tl.store(codes_ptr + i[:, None] * C + c[None, :], codes.to(tl.uint8), mask=inside[:, None] & is_column)


@triton.constexpr_function
def tokens_of_tile(g, N):
    """Tokens per group in a tile of N tokens, which holds tokens of several groups if a group has fewer.

    At most 16, because Triton 3.6 does not prefetch tiles of whole groups of 32.
    """
    return min(16, N, triton.next_power_of_2(g))


@triton.constexpr_function
def in_words(FORM):
    """Whether attention can read groups by `load_words`."""
    whole = FORM.D1 == 0 and FORM.V1 == 0 and tile_width(FORM.D) == FORM.D and tile_width(FORM.DV) == FORM.DV
    return FORM.bits == 4 and whole and min(FORM.D, FORM.DV) >= 64


@triton.jit
def _load(pieces, at, there, COPY: tl.constexpr):
    """Load elements ``[n, T, m]`` at offsets ``at`` ``[T, m]`` of n pieces. there: mask ``[T, m]``.

    COPY: also store them in the slots of pieces that move.
    """
    x = tl.load(pieces.ptr[:, None, None] + at[None], mask=there[None], other=0)
    if COPY:
        tl.store(pieces.slot[:, None, None] + at[None], x, mask=there[None] & pieces.moves[:, None, None])
    return x


@triton.jit
def _as(pieces, dtype: tl.constexpr):
    """Pieces whose pointers are to numbers of ``dtype`` instead of bytes."""
    of: tl.constexpr = tl.pointer_type(dtype)
    return Pieces(pieces.ptr.to(of), pieces.slot.to(of), pieces.moves, pieces.signs, pieces.steps)


@triton.jit
def _load_numbers(
    pieces, AT: tl.constexpr, first, T: tl.constexpr, dtype: tl.constexpr, FORM: tl.constexpr, COPY: tl.constexpr
):  # fmt: skip
    """One number per token for T tokens from ``first`` on, float32 ``[n * T]``. AT: offset of token 0's in a piece."""
    N: tl.constexpr = pieces.ptr.shape[0] * T
    if dtype.primitive_bitwidth == 16 and FORM.g % 2 == 0:
        # two are loaded as one word, which is wide enough to be prefetched
        j = first // 2 + tl.arange(0, T // 2)
        words = _load(_as(pieces, tl.int32), AT // 2 + j[:, None], (j < FORM.g // 2)[:, None], COPY)  # [n, T // 2, 1]
        x = coding.pair_of(words, dtype)
        return tl.reshape(tl.join(x[0], x[1]), (N,)).to(tl.float32)
    else:
        i = first + tl.arange(0, T)
        return tl.reshape(_load(_as(pieces, dtype), AT + i[:, None], (i < FORM.g)[:, None], COPY), (N,)).to(tl.float32)


@triton.jit
def _load_codes(pieces, at, d, there, WIDTH: tl.constexpr, FORM: tl.constexpr, COPY: tl.constexpr):
    """Codes of columns d, float32 ``[n, T, P]``, of vectors WIDTH wide that begin at offsets ``at`` ``[T]``."""
    C: tl.constexpr = WIDTH * FORM.bits // 8
    at = at[:, None] + (d % C)[None, :]
    codes = tl.load(pieces.ptr[:, None, None] + at[None], mask=there[None], other=0)  # [n, T, P]
    if COPY:
        first = (there & (d < C)[None, :])[None] & pieces.moves[:, None, None]
        tl.store(pieces.slot[:, None, None] + at[None], codes, mask=first)
    return coding.unpacked(codes, d, C, FORM.bits)


@triton.jit
def _flat(x):
    """Tokens of all groups as one tile: ``[n, T, P]`` reshaped to ``[n * T, P]``."""
    return tl.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))


@triton.jit
def _load_centre(pieces, column, there, FORM: tl.constexpr):
    """Numbers of the n groups' centres in columns ``column`` ``[1, P]``, float32 ``[n, 1, P]``."""
    C: tl.constexpr = 4 * sign_bytes(FORM.D)
    at = FORM.g * sign_bytes(FORM.D) + column % C
    bytes = tl.load(pieces.signs[:, None, None] + at[None], mask=there[None], other=0).to(tl.int32)  # [n, 1, P]
    step = tl.load(pieces.steps + FORM.g).to(tl.float32)[:, None, None]
    return step * (2 * ((bytes >> (column // C * 4)[None]) & 15) - _CENTRE).to(tl.float32)


@triton.jit
def load_centres(signs_ptr, dtype: tl.constexpr, FORM: tl.constexpr, ASM: tl.constexpr):
    """Centres, in units of two steps, of groups whose signs begin at ``signs_ptr`` ``[n]``; in the parts of `Words`."""
    ptr, x = signs_ptr.to(tl.pointer_type(tl.int16)) + FORM.g * (FORM.D // 16), ()
    words = tl.load(ptr[:, None] + tl.arange(0, FORM.D // 4)[None, :])
    for part in tl.static_range(4):
        codes = coding.middle_codes(words, 4 * part, dtype, ASM).to(tl.float32) + (MIDDLE - _CENTRE / 2)
        x += (codes.to(dtype),)
    return x


@triton.jit
def load_words(
    pieces, first, T: tl.constexpr, dtype: tl.constexpr, FORM: tl.constexpr, COPY: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The `Words` of T tokens from ``first`` on of each of n groups; finite past a group's end.

    Unlike `load_groups`, this leaves codes unscaled: attention multiplies sums of products by steps, without rounding
    keys and values to the dtype. COPY: also copy `Pieces` that move to their slots. ASM: a GPU may run assembly.
    """
    i, size = first + tl.arange(0, T), dtype.primitive_bitwidth // 8
    inside, k, v = (i < FORM.g)[:, None], (), ()
    # a token has S words of signs: word s holds the signs of all codes in words s, S + s, 2 S + s and 3 S + s
    S: tl.constexpr = FORM.D // 16
    column = tl.arange(0, FORM.D // 4)[None, :]
    bit = (column // S)[None]
    words = _load(_as(pieces, tl.int16), FORM.keys_at // 2 + i[:, None] * (FORM.D // 4) + column, inside, COPY)
    of_token = tl.minimum(i, FORM.g - 1)[:, None] * S + column % S
    signs = tl.load(pieces.signs.to(tl.pointer_type(tl.int16))[:, None, None] + of_token[None])  # [n, T, P]
    for part in tl.static_range(4):
        k += (_flat(coding.signed_codes(words, signs, bit, 4 * part, dtype, ASM)),)
    C: tl.constexpr = FORM.DV // 4
    at = FORM.values_at // 2 + i[:, None] * C + tl.arange(0, C)[None, :]
    words = _load(_as(pieces, tl.int16), at, inside, COPY)  # [n, T, C]
    for part in tl.static_range(4):
        v += (_flat(coding.middle_codes(words, 4 * part, dtype, ASM)),)
    unit = 2 * _load_numbers(pieces, FORM.steps_at // size, first, T, dtype, FORM, COPY)
    step = _load_numbers(pieces, 0, first, T, dtype, FORM, COPY)
    return Words(k, v, unit, step, _load_numbers(pieces, FORM.g, first, T, dtype, FORM, COPY))


@triton.jit
def _load_keys(
    pieces, i, dtype: tl.constexpr, FORM: tl.constexpr, COPY: tl.constexpr, LO: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Load columns ``[LO, LO + N)`` of the keys of tokens i, ``[n * T, P]``; 0 past the last column, finite past the
    last token. With fewer than 16 bits the keys are rotated, and divided by the width of the rotation's blocks.
    """
    D: tl.constexpr = FORM.D
    d, inside = LO + tl.arange(0, tile_width(N)), (i < FORM.g)[:, None]
    there = inside & (d < LO + N)[None, :]
    if FORM.bits == 16:
        return _flat(_load(pieces, i[:, None] * (D + FORM.DV) + d[None, :], there, COPY))
    else:
        size: tl.constexpr = dtype.primitive_bitwidth // 8
        step = _load(_as(pieces, dtype), FORM.steps_at // size + i[:, None], inside, COPY).to(tl.float32)  # [n, T, 1]
        column = d[None, :]
        centre = _load_centre(pieces, column, (d < LO + N)[None, :], FORM)
        codes = _load_codes(pieces, FORM.keys_at + i * (D * FORM.bits // 8), d, there, D, FORM, COPY)
        W: tl.constexpr = sign_bytes(D)
        at = tl.minimum(i, FORM.g - 1)[:, None] * W + column % W
        bytes = tl.load(pieces.signs[:, None, None] + at[None], mask=there[None], other=0)  # [n, T, P]
        bits = bytes.to(tl.int32) >> (column // W)[None]
        size_of = step * (2 * codes + 1)
        x = tl.where(bits & 1 == 1, size_of, -size_of) + centre
        return _flat(coding.to_numbers(tl.where((d < LO + N)[None, None, :], x, 0.0), dtype))


@triton.jit
def _load_values(
    pieces, i, dtype: tl.constexpr, FORM: tl.constexpr, COPY: tl.constexpr, LO: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Load columns ``[LO, LO + N)`` of the values of tokens i, as `_load_keys` loads keys."""
    d, inside = LO + tl.arange(0, tile_width(N)), (i < FORM.g)[:, None]
    there = inside & (d < LO + N)[None, :]
    if FORM.bits == 16:
        return _flat(_load(pieces, i[:, None] * (FORM.D + FORM.DV) + FORM.D + d[None, :], there, COPY))
    else:
        grid = _as(pieces, dtype)
        step = _load(grid, i[:, None], inside, COPY).to(tl.float32)
        zero = _load(grid, FORM.g + i[:, None], inside, COPY).to(tl.float32)
        codes = _load_codes(pieces, FORM.values_at + i * (FORM.DV * FORM.bits // 8), d, there, FORM.DV, FORM, COPY)
        return _flat(coding.to_numbers(zero + step * codes, dtype))


@triton.jit
def load_groups(pieces, i, dtype: tl.constexpr, FORM: tl.constexpr, COPY: tl.constexpr):
    """Load keys and values of tokens i ``[T]`` of each of n groups, in parts ``[n * T, P]``, as `StoreFormat` rounds
    them. With fewer than 16 bits keys are rotated. Finite past a group's end.

    Values of latents are the first part of their keys. COPY: also copy `Pieces` that move to their slots.
    """
    k = _load_keys(pieces, i, dtype, FORM, COPY, 0, FORM.D0)
    k = parts(k, _load_keys(pieces, i, dtype, FORM, COPY, FORM.D0, FORM.D1) if FORM.D1 > 0 else None)
    if FORM.DV == 0:
        return k, (k[0],)
    else:
        v = _load_values(pieces, i, dtype, FORM, COPY, 0, FORM.V0)
        return k, parts(v, _load_values(pieces, i, dtype, FORM, COPY, FORM.V0, FORM.V1) if FORM.V1 > 0 else None)


@triton.jit
def _words_as_numbers(words, centres, step, dtype: tl.constexpr, FORM: tl.constexpr):
    """Keys and values of `Words` as `load_groups` returns them. centres: from `load_centres`. step: of each centre."""
    k, v = (), ()
    n: tl.constexpr = step.shape[0]
    C: tl.constexpr = FORM.D // 4
    for part in tl.static_range(4):
        rest = tl.reshape(words.k[part].to(tl.float32) * words.unit[:, None], (n, words.unit.shape[0] // n, C))
        x = rest + (centres[part].to(tl.float32) * (2 * step)[:, None])[:, None, :]  # [n, T, C]
        k += (coding.to_numbers(_flat(x), dtype),)
        codes = words.v[part].to(tl.float32) + MIDDLE
        v += (coding.to_numbers(words.zero[:, None] + words.step[:, None] * codes, dtype),)
    return (coding.from_words(k, FORM.D),), (coding.from_words(v, FORM.DV),)


@triton.jit
def _rotated_back(k, rotation_ptr, LO: tl.constexpr, N: tl.constexpr, FORM: tl.constexpr):
    """Columns ``[LO, LO + N)`` of rotated keys, rotated back."""
    return coding.to_numbers(rotated_part(k, rotation_ptr, LO, N, FORM.D, True, "ieee"), k.dtype)


@triton.jit(do_not_specialize=("n",))
def recall_unpack_kernel(
    signs_ptr, steps_ptr, pieces_ptr, page_ptr, slot_ptr, rotation_ptr, k_ptr, v_ptr, s_page, s_head, s_slot, K, n,
    FORM: tl.constexpr, T: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Write keys and values of n groups of every row and KV head; grid (tiles of T tokens of each of BG groups, B * K).

    signs, steps: the index ``[B * K, n, ...]``. page, slot: int64 ``[B * K, n]``, where the piece of a group is; None:
    group i of a row is in slot i of page b. rotation: `condense.ops.recall.index.rotation` in the dtype of keys.
    """
    TILES: tl.constexpr = (FORM.g + T - 1) // T
    number, head = tl.program_id(0) // TILES * BG + tl.arange(0, BG), tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) % TILES * T
    i, group = start + tl.arange(0, T), tl.minimum(number, n - 1)
    page, slot = head // K, group.to(tl.int64)
    if page_ptr is not None:
        at = head * n + group
        page, slot = tl.load(page_ptr + at), tl.load(slot_ptr + at)
    ptr, row = pieces_ptr + (page * s_page + head % K * s_head + slot * s_slot), head * n + group
    columns: tl.constexpr = index_widths(FORM.g, FORM.D)
    pieces = Pieces(ptr, ptr, False, signs_ptr + row * columns[0], steps_ptr + row * columns[1])
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    if in_words(FORM):
        words = load_words(pieces, start, T, dtype, FORM, False, False)
        step = tl.load(pieces.steps + FORM.g).to(tl.float32)
        k, v = _words_as_numbers(words, load_centres(pieces.signs, dtype, FORM, False), step, dtype, FORM)
    else:
        k, v = load_groups(pieces, i, dtype, FORM, False)
    if FORM.bits < 16:
        first = _rotated_back(k[0], rotation_ptr, 0, FORM.D0, FORM)
        k = parts(first, _rotated_back(k[1], rotation_ptr, FORM.D0, FORM.D1, FORM) if FORM.D1 > 0 else None)
    token = tl.reshape(row[:, None] * FORM.g + i[None, :], (BG * T,))
    inside = tl.reshape((number < n)[:, None] & (i < FORM.g)[None, :], (BG * T,))
    store_rows(k_ptr, token * FORM.D, k, inside, FORM.D0, FORM.D1)
    if FORM.DV > 0:
        store_rows(v_ptr, token * FORM.DV, v, inside, FORM.V0, FORM.V1)
