"""Kernel of Recall's decode step that stores the new token, and the index and tokens of a group that closes with it.

Shapes and names as in `condense.ops.triton.recall_step_kernels`.
"""

from collections import namedtuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from condense.ops.triton.device import address, signs
from condense.ops.triton.device.codes import packed, run_width
from condense.ops.triton.device.parts import tile_width
from condense.ops.triton.recall_store_kernels import chunk_tokens, fill_up, key_codes, key_step, put_values


def close_options(D: int, *, in_step: bool) -> dict[str, int]:
    """Launch options of `recall_close_kernel` for keys of width D, of which it keeps 16 in registers.

    In a step the next kernels share multiprocessors with this one and end earlier if it has eight warps, not four: a
    step of 8 rows takes 125 us, not 140 (Llama 3.1 8B).
    """
    return {"num_warps": 4 if D <= 256 and not in_step else 8}


class StepRow(namedtuple("StepRow", "t live all_closed closed start")):
    """The task of a step in one row.

    t: position of the new token. live: whether there is one. all_closed: closed groups. closed: closed groups that the
    buffers have room for; in pages all. start: index of the row's first group in scratch memory that all rows share, a
    multiple of four; 0 if each row has its own.
    """


@triton.jit
def after_the_last(EARLY: tl.constexpr):
    """Wait for the end of the kernel before this one, then allow the launch of the next one, both only if EARLY."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def row_of_step(
    seen_ptr, real_ptr, before_ptr, b, window, G, g: tl.constexpr, HAS_REAL: tl.constexpr, PAGED: tl.constexpr
):  # fmt: skip
    """The `StepRow` of row b. G: groups that the buffers have room for.

    before: tokens of all rows before each row, plus any constant; None where each row has scratch memory of its own.
    PAGED: ``seen`` counts the new token, and is 0 for rows that have none.
    """
    t = tl.load(seen_ptr + b).to(tl.int32)
    if PAGED:
        t -= 1
    live = t >= 0
    if HAS_REAL:
        live = live & (tl.load(real_ptr + b) != 0)
    closed = tl.where(live, tl.maximum(t + 1 - window, 0) // g, 0)
    if before_ptr is None:
        return StepRow(t, live, closed, tl.minimum(closed, G), 0)
    else:
        # a row starts at a multiple of four, so that four groups are loaded at a time
        before = tl.load(before_ptr + b) - tl.load(before_ptr)
        return StepRow(t, live, closed, closed, ((before // (4 * g)).to(tl.int32) + b) * 4)


@triton.jit
def _rotated_tokens(keys, rotation_ptr, first, i, t, g: tl.constexpr, D: tl.constexpr, NEAR: tl.constexpr):
    """Rotated keys i of the group that begins at position ``first``, float32 ``[n, P]``; zeros past the last column."""
    x = chunk_tokens(keys, first + i, t, i < g, 0, D, tile_width(D), NEAR)
    return signs.rotated_part(x.to(keys.rows.dtype.element_ty), rotation_ptr, 0, D, D, False, "ieee")


@triton.jit
def _put_codes(ptr, codes, i, n: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr):
    """Pack codes ``[m, P]`` and write them to rows i (if below n) at ``ptr``, each C bytes wide."""
    bytes = packed(codes, C, BITS)
    c = tl.arange(0, bytes.shape[1])
    tl.store(ptr + i[:, None] * C + c[None, :], bytes, mask=(i < n)[:, None] & (c < C)[None, :])


@triton.jit
def _put_index(keys, rotation_ptr, signs_ptr, steps_ptr, store_ptr, first, t, FORM: tl.constexpr, NEAR: tl.constexpr):
    """Write the index of the group that begins at position ``first``, as `condense.ops.recall.split_keys` makes it;
    with fewer than 16 bits also its stored keys: steps and codes of the sizes of their differences from the centre.
    """
    g: tl.constexpr = FORM.g
    D: tl.constexpr = FORM.D
    W: tl.constexpr = signs.sign_bytes(D)
    dtype: tl.constexpr = steps_ptr.dtype.element_ty
    P: tl.constexpr = tile_width(D)
    is_column = (tl.arange(0, P) < D)[None, :]
    rotated, mean = None, tl.zeros([P], tl.float32)
    if g <= 16:  # rotated once, and kept
        rotated = _rotated_tokens(keys, rotation_ptr, first, tl.arange(0, 16), t, g, D, NEAR)
    # no prefetch (num_stages=1), which would take shared memory from every program of the kernel
    for start in tl.range(0, g, 16, num_stages=1):
        i = start + tl.arange(0, 16)
        x = _rotated_tokens(keys, rotation_ptr, first, i, t, g, D, NEAR) if rotated is None else rotated
        mean += tl.sum(tl.where((i < g)[:, None], x, 0.0), 0)
    mean = mean[None, :] * (1 / g)
    of_centre, unit = signs.centre_unit(tl.max(tl.abs(mean)), dtype, D)
    tl.store(steps_ptr + g, of_centre)
    codes = signs.centre_codes(mean, unit)  # [1, P]
    # the centre is repeated, because the matrix product of `packed` takes at least 16 columns
    N: tl.constexpr = max(1, 16 // run_width(4 * W, P))
    same = tl.broadcast_to(tl.where(is_column, codes, 0.0), (N, P))
    _put_codes(signs_ptr + g * W, same, tl.arange(0, N), 1, 4 * W, 4)
    for start in tl.range(0, g, 16, num_stages=1):
        i = start + tl.arange(0, 16)
        x = _rotated_tokens(keys, rotation_ptr, first, i, t, g, D, NEAR) if rotated is None else rotated
        x = tl.where(is_column, x - signs.centre_numbers(codes, unit), 0.0)  # [16, P]
        size = tl.abs(x)
        steps = signs.key_steps(tl.sum(x * x, 1), tl.sum(size, 1), D)
        tl.store(steps_ptr + i, steps.to(dtype), mask=i < g)
        _put_codes(signs_ptr, tl.where((x >= 0) & is_column, 1.0, 0.0), i, g, W, 1)
        if FORM.bits < 16:
            step = key_step(tl.max(size, 1), dtype, FORM)
            tl.store((store_ptr + FORM.steps_at).to(tl.pointer_type(dtype)) + i, step, mask=i < g)
            _put_codes(store_ptr + FORM.keys_at, key_codes(size, step, FORM), i, g, D * FORM.bits // 8, FORM.bits)
    if FORM.bits < 16:
        fill_up(store_ptr, dtype.primitive_bitwidth // 8, FORM)


@triton.jit
def _put_token(tokens, t, D: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr):
    """Write the new token to its slot of the ring or its page."""
    d = tl.arange(0, P)
    new = tl.load(tokens.new + d, mask=d < D, other=0.0)
    tl.store(tokens.rows + address.token_rows(tokens.place, t, None, D, NEAR) + d, new, mask=d < D)


@triton.jit
def _put_group(
    tokens, store_ptr, first, t, g: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
    NEAR: tl.constexpr,
):  # fmt: skip
    """Copy the keys or values of the group that begins at position ``first`` to its place in the store."""
    d = tl.arange(0, P)
    for start in range(0, g, 16):
        i = start + tl.arange(0, 16)
        x = chunk_tokens(tokens, first + i, t, i < g, 0, D, P, NEAR)  # [16, P]
        at = i[:, None] * WIDTH + d[None, :]
        tl.store(store_ptr + at, x.to(store_ptr.dtype.element_ty), mask=(i < g)[:, None] & (d < D)[None, :])


@triton.jit
def _put_sum(sums, tokens, t, g: tl.constexpr, D: tl.constexpr, NEAR: tl.constexpr):
    """Write the sum of `Tokens`, D wide, over all groups up to the one that token t completes; zeros past column D."""
    N: tl.constexpr = min(256, tile_width(D))
    C: tl.constexpr = address.num_columns(D, g, NEAR)
    j = (t + 1) // g
    for LO in tl.range(0, C, N, num_stages=1):
        x = tl.zeros([16, N], tl.float64)
        # no prefetch, as above
        for start in tl.range(0, g, 16, num_stages=1):
            i = start + tl.arange(0, 16)
            x += chunk_tokens(tokens, t + 1 - g + i, t, i < g, LO, D, N, NEAR).to(tl.float64)
        d = LO + tl.arange(0, N)
        there, older = d < C, (d < D) & (j > 1)
        before = tl.load(address.sum_columns(sums, j - 1, d, older, D, g, NEAR), mask=older, other=0.0)  # [N]
        tl.store(address.sum_columns(sums, j, d, there, D, g, NEAR), before + tl.sum(x, 0), mask=there)


@triton.jit
def recall_close_kernel(
    k_ptr, v_ptr, signs_ptr, steps_ptr, store_ptr, ring_k_ptr, ring_v_ptr, sums_ptr, seen_ptr, real_ptr, near_ptr,
    far_ptr, stamps_ptr, clock_ptr, rotation_ptr, s_kb, s_kh, s_vb, s_vh, K, G, W, N, num_sums, delay,
    FORM: tl.constexpr, HAS_REAL: tl.constexpr, EARLY: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Write the new token to the rings, and a group that closes to index and store; add up values. Grid (B * K, 4):
    program 0 writes keys, 1 values, 2 the index and stored keys of fewer than 16 bits, 3 the sum (not without sums).

    A group closes once ``delay`` tokens have followed it; its values are added up when its last token is read. sums:
    None if queries do not see them; their ring has ``num_sums``. near, far: page tables of tokens and of records, None
    for rings and arrays. stamps, clock: of records and of `condense.ops.step.pages.PagedSlots`, None without slots.
    rotation: `condense.ops.recall.index.rotation` in the dtype of the keys.
    """
    if EARLY:
        gdc_launch_dependents()
    head, work = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, kvh = head // K, head % K
    g: tl.constexpr = FORM.g
    D: tl.constexpr = FORM.D
    DV: tl.constexpr = FORM.DV
    # columns of tiles of keys, of values, and of the bytes of a stored value
    P: tl.constexpr = max(32, tile_width(D))
    PV: tl.constexpr = max(32, tile_width(DV))
    PS: tl.constexpr = max(32, tile_width(DV * min(FORM.bits, 8) // 8))
    row = row_of_step(seen_ptr, real_ptr, None, b, delay, G, g, HAS_REAL, NEAR is not None)
    t, live, closed = row.t, row.live, row.all_closed
    group = closed - 1
    first = group * g
    closes = live & (t + 1 - delay == closed * g) & (closed > 0) & (closed <= G)
    k_ptr += b * s_kb + kvh * s_kh
    v_ptr += b * s_vb + kvh * s_vh
    place = W
    if NEAR is None:
        ring_k_ptr += head * W * D
        ring_v_ptr += head * W * DV
    else:
        place = near_ptr + b * NEAR.s_table
        ring_k_ptr += kvh * NEAR.s_head
        ring_v_ptr += kvh * NEAR.s_head
        found = address.form_place(far_ptr + b * FAR.s_table, group, closes, FAR)
        record = kvh * FAR.s_stored_head + address.place_row(found, FAR, True)
        index = kvh * FAR.s_head + address.place_row(found, FAR)
    keys, values = address.Tokens(ring_k_ptr, k_ptr, place), address.Tokens(ring_v_ptr, v_ptr, place)
    if FAR is None:
        store_ptr += (head * (N // g) + group) * FORM.piece
    else:
        store_ptr += address.part_at(store_ptr, record)
    if live & (work == 0):
        if FORM.bits == 16:  # noqa: SIM102 - known when the kernel is compiled
            if closes:
                _put_group(keys, store_ptr, first, t, g, D, P, D + DV, NEAR)
        _put_token(keys, t, D, P, NEAR)
    if DV > 0:  # noqa: SIM102 - latents have no values of their own
        if live & (work == 1):
            if closes:
                if FORM.bits == 16:
                    _put_group(values, store_ptr + D, first, t, g, DV, PV, D + DV, NEAR)
                else:
                    put_values(values, store_ptr, first, t, FORM, PS, NEAR)
            _put_token(values, t, DV, PV, NEAR)
    if closes & (work == 2):
        if FAR is None:
            columns: tl.constexpr = signs.index_widths(g, D)
            at = head * G + group
            signs_ptr, steps_ptr = signs_ptr + at * columns[0], steps_ptr + at * columns[1]
        else:
            signs_ptr += address.part_at(signs_ptr, index)
            steps_ptr += address.part_at(steps_ptr, index)
            if clock_ptr is not None:
                tl.store(stamps_ptr + address.part_at(stamps_ptr, index), tl.load(clock_ptr))
        _put_index(keys, rotation_ptr, signs_ptr, steps_ptr, store_ptr, first, t, FORM, NEAR)
    if sums_ptr is not None:  # noqa: SIM102 - known when the kernel is compiled
        if live & (work == 3) & ((t + 1) % g == 0):
            if DV > 0:
                _put_sum(address.head_sums(sums_ptr, head, kvh, num_sums, place, DV, NEAR), values, t, g, DV, NEAR)
            else:
                _put_sum(address.head_sums(sums_ptr, head, kvh, num_sums, place, D, NEAR), keys, t, g, D, NEAR)
