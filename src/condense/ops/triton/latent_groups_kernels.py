"""Attention of a decode step to open groups of 4-bit latents, for Hopper: codes are decoded once, to shared memory,
where tensor cores read them as keys and as values.

A stored token is the centre of its group plus a difference. A program reads tiles of 64 vectors in three phases: the
centres of its groups as keys; the tokens' differences from them as keys and values; and the centres again as values,
weighted by their groups. One loop does all three, because separate loops are more code and take longer. Columns are in
the order in which a word of codes is unpacked (`_column`); sums are written in their own order, still rotated.

A token has D / 8 words of codes, of eight columns each, and D / 32 words of signs. The words of codes are cut into four
stretches of D / 32; word i of signs belongs to word i of each stretch. Tensor cores take powers of two, so columns are
cut into two parts: the first words of each stretch, and the rest. DeepSeek's latents of 512 + 64 columns have 16 + 2
words per stretch, MiniCPM3's of 256 + 32 columns 8 + 1.

Shapes: B rows, one KV head, R query heads, 16 of a tile, S splits; D columns of latents, of which V are values; groups
of g tokens.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from condense.ops.triton.device.address import form_place, of_group
from condense.ops.triton.device.signs import index_widths
from condense.ops.triton.limits import LATENT_WIDTHS
from condense.ops.triton.recall_choice_kernels import wanted_groups
from condense.ops.triton.recall_close_kernels import after_the_last, row_of_step
from condense.ops.triton.recall_store_kernels import Form

# vectors of a tile: tokens, or centres of groups
ROWS = gl.constexpr(64)
# Triton 3.9 calls the method `reinterpret`, 3.6 and 3.7 call it `_reinterpret`
_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
# query heads of a tile
HEADS = gl.constexpr(16)
# groups that are copied at once
_COPIED = gl.constexpr(4)


def fits(is_hopper: bool, form: Form, dtype: torch.dtype, softcap: float) -> bool:
    """Whether the kernel can read groups of this form: 4-bit latents, each group within the rows of one warp."""
    of_latents = form.DV == 0 and form.D in LATENT_WIDTHS and form.g in (8, 16)
    return is_hopper and form.bits == 4 and of_latents and dtype == torch.bfloat16 and not softcap


class _Work(namedtuple("_Work", "first behind centres tiles")):
    """The work of a split: open groups ``[first, behind)``, centres in ``centres`` tiles, tokens in ``tiles``."""


class _Kept(namedtuple("_Kept", "groups table store signs steps places slots")):
    """Pointers. groups: numbers of open groups. table: page table of records. store, signs, steps: stored tokens and
    index. places: where each open group is read, and slots: copies of groups; None without slots.
    """


class _Where(namedtuple("_Where", "piece signs steps")):
    """Pointers to the stored tokens, the signs and the steps of groups."""


class _Vectors(namedtuple("_Vectors", "codes signs unit")):
    """A tile of vectors. codes, signs: 64-bit words of each part of columns. unit: scale per row, float32 ``[64]``."""


@triton.constexpr_function
def _first_word(PART, D):
    """Number, within a stretch, of the first word of a part; for part 2 the number of words per stretch."""
    return (0, 1 << (D // 32 - 1).bit_length() - 1, D // 32)[PART]


@triton.constexpr_function
def _num_words(PART, D):
    """Number of words of a stretch that are in a part."""
    return _first_word(PART + 1, D) - _first_word(PART, D)


@triton.constexpr_function
def _columns(PART, D):
    """Columns of a part in shared memory: 32 for each word (8 in each of four stretches), at least 64."""
    return max(64, 32 * _num_words(PART, D))


@triton.constexpr_function
def _words(PART, D, WARPS):
    """Layout of 64-bit words ``[64 rows, 4 stretches, n]``."""
    pairs = _columns(PART, D) // 64
    threads = [8, 4, 1] if PART else [32 // pairs, 1, pairs]
    return gl.BlockedLayout([1, 1 if PART else 4, 1], threads, [WARPS, 1, 1], [2, 1, 0])


@triton.constexpr_function
def _stretch(PART, D, WARPS):
    """Layout of one number per stretch, a slice of `_words`."""
    return gl.SliceLayout(0, gl.SliceLayout(2, _words(PART, D, WARPS)))


@triton.constexpr_function
def _of_rows(PART, D, WARPS):
    """Layout of one number per row: a slice of `_words` for parts 0 and 1, of products with queries for part 2."""
    return gl.SliceLayout(1, _sums(2, WARPS) if PART == 2 else gl.SliceLayout(2, _words(PART, D, WARPS)))


@triton.constexpr_function
def _sums(PART, WARPS):
    """Layout of accumulators ``[columns, 16]`` of parts 0 and 1; for part 2, of products with queries ``[64, 16]``.

    Four warps cover 64 rows; with eight warps, each four have half of the queries.
    """
    if PART == 0:
        return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 16, 16])
    return gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 64 // WARPS, 16])


@triton.constexpr_function
def _of_heads(PART, WARPS):
    """Layout of one number per query head, a slice of `_sums`."""
    return gl.SliceLayout(0, _sums(PART, WARPS))


@triton.constexpr_function
def _swizzled(bits):
    """Layout of shared memory with 128-byte swizzling, for numbers of ``bits`` bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


@triton.constexpr_function
def _unpack_asm():
    """Assembly, constraints and types of `_put`, which decodes codes to bfloat16.

    A code in bits 1 to 4 of bfloat16 64.0 makes 64 + code, from which a constant is subtracted: what remains is
    ``code + 1/2`` for tokens, whose signs a shift by 12, 8, 4 or 0 then moves to the sign bits of two numbers (set
    means not below 0), and ``code - 7.5`` for centres.
    """
    lines = [".reg .b32 x<2>, y<2>, t;", "mov.b64 {x0, x1}, $8; mov.b64 {y0, y1}, $9;"]
    for out in range(8):
        word, j = out // 4, out % 4
        move = f"shr.u32 t, x{word}, {4 * j - 1};" if j else f"shl.b32 t, x{word}, 1;"
        lines += [
            f"{move} lop3.b32 t, t, 0x001E001E, $10, 0xEA; add.rn.bf16x2 ${out}, t, $11;",
            f"shl.b32 t, y{word}, {12 - 4 * j}; lop3.b32 ${out}, t, $12, ${out}, 0xA6;",
        ]
    return "{ " + "\n".join(lines) + " }", ",".join(["=&r"] * 8 + ["l"] * 2 + ["r"] * 3), (gl.int32,) * 8


@gluon.jit
def _put(tile, are_tokens, keys, D: gl.constexpr):
    """Decode a `_Vectors` to bfloat16 and write both parts to shared memory at ``keys``."""
    W: gl.constexpr = gl.num_warps()
    asm: gl.constexpr = _unpack_asm()
    # pairs of bfloat16: 64.5 or 64, the number that is added, and a mask of sign bits
    base = gl.where(are_tokens, 0x42814281, 0x42804280)
    less = gl.where(are_tokens, -0x3D7F3D80, -0x3D703D71)
    sign = gl.where(are_tokens, -0x7FFF8000, 0)
    for part in gl.static_range(2):
        k = gl.arange(0, 4, _stretch(part, D, W))
        none = gl.zeros(tile.codes[part].shape, gl.int32, _words(part, D, W))
        given = (
            tile.codes[part],
            tile.signs[part] << (3 - k)[None, :, None].to(gl.int64),
            none + base,
            none + less,
            none + sign,
        )
        x = gl.inline_asm_elementwise(asm[0], asm[1], given, asm[2], is_pure=True, pack=1)
        even, odd = gl.join(gl.join(x[0], x[4]), gl.join(x[2], x[6])), gl.join(gl.join(x[1], x[5]), gl.join(x[3], x[7]))
        if _IS_PUBLIC:
            words = keys[part].reinterpret(gl.int32, [ROWS, _columns(part, D) // 2], _swizzled(32))
        else:
            words = keys[part]._reinterpret(gl.int32, [ROWS, _columns(part, D) // 2], _swizzled(32))
        words.store(gl.reshape(gl.join(even, odd), [ROWS, _columns(part, D) // 2]))
    hopper.fence_async_shared()


@gluon.jit
def _column(c, PART: gl.constexpr, D: gl.constexpr):
    """Numbers of the columns in places c of a part; D for places that no column has."""
    N: gl.constexpr = _columns(PART, D) // 32
    word = D // 32 * (c // (8 * N)) + _first_word(PART, D) + c // 8 % N
    # the low 4 bits of a word's bytes are the codes of four columns, the high 4 bits those of columns D / 2 further
    column = 4 * word + 2 * (c % 2) + c // 4 % 2 + D // 2 * (c // 2 % 2)
    return column if _num_words(PART, D) == N else gl.where(c // 8 % N < _num_words(PART, D), column, D)


@gluon.jit
def _row(kept, n, FAR: gl.constexpr):
    """Numbers of the groups at index n of the open ones; in pages, the places of their records."""
    group = gl.load(kept.groups + n)
    return group.to(gl.int64) if FAR is None else form_place(kept.table, group, group >= 0, FAR)


@gluon.jit
def _slot(kept, place, FORM: gl.constexpr):
    """Pointers to slots. place: from `_find_slots` of `condense.ops.triton.recall_step_choice_kernels`, >= 0."""
    return kept.slots + (place >> 1).to(gl.int64) * FORM.piece


@gluon.jit
def _copy_new(kept, work, FORM: gl.constexpr, FAR: gl.constexpr):
    """Copy the pieces of groups that have a new slot from the store, in host memory, to their slots.

    Before attention, because the bus transfers 32 bytes at once: in attention's order many would be sent twice.
    """
    W: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = FORM.piece // 4
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, W], [1, 0])
    i = gl.arange(0, triton.next_power_of_2(WORDS), gl.SliceLayout(0, layout))[None, :]
    of: gl.constexpr = gl.pointer_type(gl.int32)
    for start in range(work.first, work.behind, _COPIED):
        n = start + gl.arange(0, _COPIED, gl.SliceLayout(1, layout))
        place = gl.load(kept.places + n, mask=n < work.behind, other=-1)
        is_new = (place >= 0) & (place % 2 == 1)
        row = _row(kept, gl.minimum(n, work.behind - 1), FAR)
        piece = of_group(kept.store, row, FORM.piece, FAR, True)
        there = is_new[:, None] & (i < WORDS)
        words = gl.load(piece.to(of)[:, None] + i, mask=there)
        gl.store(_slot(kept, place, FORM).to(of)[:, None] + i, words, mask=there)
    tl.debug_barrier()


@gluon.jit
def _found(kept, n, HAS_SLOTS: gl.constexpr, FORM: gl.constexpr, FAR: gl.constexpr):
    """The `_Where` of the groups at index n of the open ones."""
    columns: gl.constexpr = index_widths(FORM.g, FORM.D)
    row = _row(kept, n, FAR)
    piece = of_group(kept.store, row, FORM.piece, FAR, True)
    if HAS_SLOTS:
        place = gl.load(kept.places + n)
        piece = gl.where(place >= 0, _slot(kept, place, FORM), piece)
    signs = of_group(kept.signs, row, columns[0], FAR)
    return _Where(piece, signs, of_group(kept.steps, row, columns[1], FAR))


@triton.constexpr_function
def _bits(D):
    """Bits of the words that are loaded: 32 if the length of a stretch in words is odd, so not aligned to 64 bits."""
    return 64 if D % 64 == 0 else 32


@gluon.jit
def _load_pairs(ptr, first, i, PART: gl.constexpr, D: gl.constexpr):
    """64-bit words ``[n, stretches, pairs]``: pairs i of 32-bit words from word ``first`` of each stretch on, at ptr
    ``[n]``. Past the last word of a part that word is repeated.
    """
    LAST: gl.constexpr = _num_words(PART, D) - 1
    of: gl.constexpr = gl.pointer_type(gl.int64 if _bits(D) == 64 else gl.int32)
    ptr = ptr.to(of)[:, None, None]
    if _bits(D) == 64:
        return gl.load(ptr + (first + i))
    else:
        low = gl.load(ptr + (first + gl.minimum(2 * i, LAST))).to(gl.int64)
        return low & 0xFFFFFFFF | gl.load(ptr + (first + gl.minimum(2 * i + 1, LAST))).to(gl.int64) << 32


@gluon.jit
def _load_words(where, row, are_tokens, PART: gl.constexpr, FORM: gl.constexpr):
    """Load words of codes and of signs of one part of columns, for each row. where: `_Where` of the rows' groups."""
    W: gl.constexpr = gl.num_warps()
    D: gl.constexpr = FORM.D
    SKIPPED: gl.constexpr = 4 * _first_word(PART, D)
    token = row % FORM.g
    i = gl.arange(0, _columns(PART, D) // 64, gl.SliceLayout(0, gl.SliceLayout(1, _words(PART, D, W))))[None, None, :]
    first = (gl.arange(0, 4, _stretch(PART, D, W)) * (D // _bits(D)))[None, :, None]
    keys = where.piece + (FORM.keys_at + token * (D // 2) + SKIPPED)
    vectors = gl.where((row < 0) | are_tokens, keys, where.signs + (FORM.g * (D // 8) + SKIPPED))
    codes = _load_pairs(vectors, first, i, PART, D)
    return codes, _load_pairs(where.signs + (token * (D // 8) + SKIPPED), 0, i, PART, D)


@gluon.jit
def _groups(work, t, row, g: gl.constexpr):
    """Index, among the open groups, of the group of each row of tile t."""
    token = t - work.centres
    are_tokens = (token >= 0) & (token < work.tiles)
    start = gl.where(token < 0, t, token - work.tiles) * ROWS
    n = gl.where((row < 0) | are_tokens, token * (ROWS // g) + row // g, start + row)
    return work.first + n


@gluon.jit
def _load_tile(kept, work, t, HAS_SLOTS: gl.constexpr, FORM: gl.constexpr, FAR: gl.constexpr):
    """Load tile t of a split as `_Vectors`. Rows past the last group repeat that group."""
    W: gl.constexpr = gl.num_warps()
    are_tokens = (t >= work.centres) & (t < work.centres + work.tiles)
    codes, signs = (), ()
    for part in gl.static_range(2):
        row = gl.arange(0, ROWS, _of_rows(part, FORM.D, W))
        n = gl.minimum(_groups(work, t, row, FORM.g), work.behind - 1)
        x = _load_words(_found(kept, n, HAS_SLOTS, FORM, FAR), row, are_tokens, part, FORM)
        codes += (x[0],)
        signs += (x[1],)
    row = gl.arange(0, ROWS, _of_rows(2, FORM.D, W))
    where = _found(kept, gl.minimum(_groups(work, t, row, FORM.g), work.behind - 1), HAS_SLOTS, FORM, FAR)
    of: gl.constexpr = gl.pointer_type(where.steps.dtype.element_ty)
    at = (where.piece + FORM.steps_at).to(of) + row % FORM.g
    unit = 2 * gl.load(gl.where((row < 0) | are_tokens, at, where.steps + FORM.g)).to(gl.float32)
    return _Vectors(codes, signs, unit)


@triton.constexpr_function
def _axis(PART, AXIS, WARPS):
    """Layout of one axis of queries ``[16, words, 2, 4]``: heads, words of codes, low or high bits, columns."""
    threads = [2, 8, 2, 1] if PART else [1, 16, 2, 1]
    layout = gl.BlockedLayout([1, 1, 1, 4], threads, [WARPS, 1, 1, 1], [3, 2, 1, 0])
    for axis in (3, 2, 1, 0):
        layout = layout if axis == AXIS else gl.SliceLayout(axis, layout)
    return layout


@gluon.jit
def _queries(rotated_ptr, R, PART: gl.constexpr, D: gl.constexpr):
    """Load a part of a tile's rotated queries to shared memory, four columns at a time, in the order of `_column`."""
    W: gl.constexpr = gl.num_warps()
    N: gl.constexpr = _columns(PART, D) // 32
    r = (gl.program_id(2) * HEADS + gl.arange(0, HEADS, _axis(PART, 0, W)))[:, None, None, None]
    word = gl.arange(0, 4 * N, _axis(PART, 1, W))[None, :, None, None]
    half = gl.arange(0, 2, _axis(PART, 2, W))[None, None, :, None]
    column = 4 * (D // 32 * (word // N) + _first_word(PART, D) + word % N) + D // 2 * half
    column += gl.arange(0, 4, _axis(PART, 3, W))[None, None, None, :]
    if _num_words(PART, D) < N:
        column = gl.where(word % N < _num_words(PART, D), column, -1)
    x = gl.load(rotated_ptr + r * D + column, mask=(r < R) & (column >= 0), other=0.0).to(gl.bfloat16)
    x = gl.permute(gl.reshape(x, [HEADS, 4 * N, 2, 2, 2]), [0, 1, 4, 2, 3])
    x = gl.reshape(x, [HEADS, _columns(PART, D)])
    return gl.allocate_shared_memory(gl.bfloat16, [HEADS, _columns(PART, D)], _swizzled(16), x)


@gluon.jit
def _add_values(acc, keys, weights, p):
    """Add keys in shared memory, as values with weights p ``[64, 16]``, to the accumulators; return them."""
    weights.store(gl.permute(p.to(weights.dtype), [1, 0]))
    hopper.fence_async_shared()
    found = ()
    for part in gl.static_range(2):
        found += (hopper.warpgroup_mma(keys[part].permute([1, 0]), weights.permute([1, 0]), acc[part], is_async=True),)
    return hopper.warpgroup_mma_wait(0, found)


@gluon.jit
def _put_weights(p, m, base_ptr, R, start, behind, g: gl.constexpr):
    """Write the base-2 logarithm of each group's weight for a tile of tokens whose groups begin at ``start``.

    base_ptr: pairs of numbers per group and head; the first is the product with the centre, this is the second.
    p ``[64, 16]``: weights of the tokens, relative to the largest scores m.
    """
    # a group's tokens are rows of one warp
    weight = gl.sum(gl.reshape(p, [ROWS // g, g, HEADS]), 1)
    L: gl.constexpr = weight.type.layout
    n = start + gl.arange(0, ROWS // g, gl.SliceLayout(1, L))
    r = gl.program_id(2) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(0, L))
    log = gl.convert_layout(m, gl.SliceLayout(0, L))[None, :] + gl.log2(weight)
    gl.store(base_ptr + 1 + 2 * (R * n[:, None] + r[None, :]), log, mask=(r < R)[None, :] & (n < behind)[:, None])


@gluon.jit
def _write(acc, total, m, part_ptr, lse_ptr, row, inside, FORM: gl.constexpr):
    """Write outputs and log-sum-exps of a split to rows ``row`` ``[16]``, where ``inside``."""
    W: gl.constexpr = gl.num_warps()
    gl.store(lse_ptr + row, m + gl.log2(total), mask=inside)
    V: gl.constexpr = FORM.V0
    total = 1 / gl.where(total > 0, total, 1.0)
    for part in gl.static_range(2):
        c = _column(gl.arange(0, _columns(part, FORM.D), gl.SliceLayout(1, _sums(part, W))), part, FORM.D)
        at = gl.convert_layout(part_ptr + row.to(gl.int64) * V, _of_heads(part, W))
        there = gl.convert_layout(inside, _of_heads(part, W))[None, :] & (c < V)[:, None]
        x = acc[part] * gl.convert_layout(total, _of_heads(part, W))[None, :]
        gl.store(at[None, :] + c[:, None], x, mask=there)


@gluon.jit(do_not_specialize=("least", "part", "of"))
def latent_groups_kernel(
    rotated_ptr, signs_ptr, steps_ptr, store_ptr, base_ptr, groups_ptr, seen_ptr, real_ptr,
    part_ptr, lse_ptr, far_ptr, before_ptr, place_ptr, slots_ptr,
    R, G, N, window, most_opened, least, part, of, splits, slots, scale,
    HAS_SLOTS: gl.constexpr, FORM: gl.constexpr, HAS_REAL: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    """Write attention to open groups: part float32 ``[B, R, splits, V]``, still rotated, and base-2 log-sum-exps
    ``[B, R, splits]``.

    Grid (S, B, tiles of 16 query heads); another kernel writes the splits behind the first S. Arguments as in
    `condense.ops.triton.recall_step_kernels.recall_attend_kernel`. base ``[B, groups, R, 2]``: scratch memory for each
    open group's product with its centre, and the logarithm of its weight. place, slots: None without slots.
    """
    W: gl.constexpr = gl.num_warps()
    split, S, b = gl.program_id(0), gl.num_programs(0), gl.program_id(1).to(gl.int64)
    r = gl.program_id(2) * HEADS + gl.arange(0, HEADS, _of_heads(2, W))
    inside, row = r < R, (b * R + r) * splits + split
    after_the_last(True)
    this = row_of_step(seen_ptr, real_ptr, before_ptr, b, window, G, FORM.g, HAS_REAL, FAR is not None)
    count = wanted_groups(this.closed, most_opened, least, part, of)
    tiles = gl.cdiv(count, ROWS // FORM.g)
    lo, hi = tiles * split // S, tiles * (split + 1) // S
    first, behind = lo * (ROWS // FORM.g), gl.minimum(hi * (ROWS // FORM.g), count)
    work = _Work(first, behind, gl.cdiv(behind - first, ROWS), hi - lo)
    columns: gl.constexpr = index_widths(FORM.g, FORM.D)
    if FAR is None:
        store_ptr, signs_ptr = store_ptr + b * (N // FORM.g) * FORM.piece, signs_ptr + b * G * columns[0]
        steps_ptr, table, start = steps_ptr + b * G * columns[1], None, b * most_opened
    else:
        table, start = far_ptr + b * FAR.s_table, this.start
    if HAS_SLOTS:
        place_ptr, slots_ptr = place_ptr + b * most_opened, slots_ptr + b * slots * FORM.piece
    kept = _Kept(groups_ptr + start, table, store_ptr, signs_ptr, steps_ptr, place_ptr, slots_ptr)
    base_ptr += 2 * start * R
    acc = ()
    for i in gl.static_range(2):
        acc += (gl.zeros([_columns(i, FORM.D), HEADS], gl.float32, _sums(i, W)),)
    m = gl.full([HEADS], float("-inf"), gl.float32, _of_heads(2, W))
    total = gl.zeros([ROWS, HEADS], gl.float32, _sums(2, W))
    if hi > lo:
        keys, queries = (), ()
        for i in gl.static_range(2):
            keys += (gl.allocate_shared_memory(gl.bfloat16, [ROWS, _columns(i, FORM.D)], _swizzled(16)),)
            queries += (_queries(rotated_ptr + b * R * FORM.D, R, i, FORM.D),)
        weights = gl.allocate_shared_memory(gl.bfloat16, [HEADS, ROWS], _swizzled(16))
        row_of, heads = gl.arange(0, ROWS, _of_rows(2, FORM.D, W)), r[None, :]
        last = work.centres + work.tiles + work.centres - 1
        if HAS_SLOTS:
            _copy_new(kept, work, FORM, FAR)
        tile = _load_tile(kept, work, 0, HAS_SLOTS, FORM, FAR)
        for t in range(last + 1):
            token = t - work.centres
            are_tokens = (token >= 0) & (token < work.tiles)
            _put(tile, are_tokens, keys, FORM.D)
            # also makes the logarithms that other threads wrote visible
            tl.debug_barrier()
            n, unit = _groups(work, t, row_of, FORM.g), tile.unit[:, None]
            seen, there = (n < behind)[:, None], inside[None, :] & (n < behind)[:, None]
            of_group = base_ptr + 2 * (R * n[:, None] + heads)
            known = gl.load(of_group + (token >= work.tiles), mask=there & (token >= 0), other=0.0)
            s = gl.zeros([ROWS, HEADS], gl.float32, _sums(2, W))
            for i in gl.static_range(2):
                s = hopper.warpgroup_mma(keys[i], queries[i].permute([1, 0]), s, use_acc=i > 0, is_async=True)
            # the next tile is loaded while this one is multiplied
            tile = _load_tile(kept, work, gl.minimum(t + 1, last), HAS_SLOTS, FORM, FAR)
            s = hopper.warpgroup_mma_wait(0, [s]) * unit
            if token < 0:
                gl.store(of_group, s, mask=there)
            else:
                s = gl.where(seen, gl.where(seen & are_tokens, (s + known) * scale, known), float("-inf"))
                larger = gl.maximum(m, gl.max(gl.where(seen & are_tokens, s, float("-inf")), 0))
                p, alpha = gl.exp2(s - larger[None, :]), gl.exp2(m - larger)
                m = larger
                if are_tokens:
                    total = total * alpha[None, :] + p
                    _put_weights(p, m, base_ptr, R, work.first + token * (ROWS // FORM.g), behind, FORM.g)
                of_all = gl.convert_layout(alpha, _of_heads(0, W))
                acc = _add_values((acc[0] * of_all[None, :], acc[1] * alpha[None, :]), keys, weights, p * unit)
    _write(acc, gl.sum(total, 0), m, part_ptr, lse_ptr, row, inside, FORM)
