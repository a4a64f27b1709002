"""Kernel of Recall's decode step that scores the index of closed groups, and one that rotates wide queries before it.

Shapes and names as in `condense.ops.triton.recall_step_kernels`. A tile holds T tokens of each of BG groups; T is g
rounded up to a power of two, and a group's last token is repeated to fill the tile. On Hopper a warp reads 8 groups at
a time instead, for 4 query heads (`condense.ops.triton.device.lane_signs`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from condense.ops.recall.index import CENTRE_LEVELS
from condense.ops.triton.device import lane_signs, lanes, sign_pieces
from condense.ops.triton.device.address import form_place, group_at, head_rows
from condense.ops.triton.device.lane_signs import COUNT
from condense.ops.triton.device.lanes import HEADS
from condense.ops.triton.device.parts import tile_width
from condense.ops.triton.device.signs import centre_products, index_widths, rotated_queries, sign_bytes, sign_products
from condense.ops.triton.device.softmax import soft_cap
from condense.ops.triton.recall_choice_kernels import wanted_groups
from condense.ops.triton.recall_close_kernels import row_of_step

_CENTRE = tl.constexpr(float(CENTRE_LEVELS))
# groups per tile of the loop that adds the centres' products to scores
_ADDED = tl.constexpr(64)


@triton.jit
def _found(far_ptr, group, closed, FAR: tl.constexpr):
    """Rows of groups in the index: their numbers, or in pages the places (`form_place`) of their records. A number past
    the closed groups stands for the last closed one.
    """
    row = tl.minimum(group, closed - 1)
    return row if FAR is None else form_place(far_ptr, row, closed > 0, FAR)


@triton.jit
def _load_steps(steps_ptr, row, i, closed, g: tl.constexpr, FAR: tl.constexpr):
    """Load steps of tokens i of groups, float32; i = g is the centre's. 0 if no group is closed. row: from `_found`."""
    return tl.load(steps_ptr + group_at(steps_ptr, row, g + 1, FAR) + i, mask=closed > 0, other=0.0).to(tl.float32)


@triton.jit
def _signs_at(signs_ptr, row, i, g: tl.constexpr, D: tl.constexpr, FAR: tl.constexpr):
    """Offsets of the sign bytes of tokens i of groups; i = g gives the centre's codes. row: from `_found`."""
    return group_at(signs_ptr, row, index_widths(g, D)[0], FAR) + i * sign_bytes(D)


@triton.jit
def _load_signs(signs_ptr, row, i, g: tl.constexpr, D: tl.constexpr, FAR: tl.constexpr):
    """Load the sign bytes of tokens i of groups, uint8 ``[n, bytes]``. row: from `_found`."""
    W: tl.constexpr = sign_bytes(D)
    c = tl.arange(0, tile_width(W))
    at = signs_ptr + _signs_at(signs_ptr, row, i, g, D, FAR)[:, None] + c[None, :]  # [n, bytes]
    return tl.load(at) if tile_width(W) == W else tl.load(at, mask=(c < W)[None, :], other=0)


@triton.jit
def _found_by_lanes(far_ptr, first, closed, e, FAR: tl.constexpr):
    """Rows of groups ``first + e // 4``, ``[E]``, as `_found` returns them, but at least 0."""
    return tl.maximum(_found(far_ptr, first + e // 4, closed, FAR), 0)


@triton.jit
def _load_lanes(signs_ptr, steps_ptr, row, e, g: tl.constexpr, D: tl.constexpr, FAR: tl.constexpr):
    """Load the index of a warp's 8 groups. row: from `_found_by_lanes`.

    Returns a pair of words of token signs per group, for `lane_signs.sign_products`; one step per pair of groups, for
    `_steps_of_tokens`; and the words and the step of the centre of the thread's group ``e // 4 % 8``, for
    `lane_signs.centre_product`.
    """
    signs, steps = (), ()
    for i in tl.static_range(0, 8, 2):
        # only lanes 4 i to 4 i + 3 know the row of group i: they broadcast it
        first, second = lanes.from_lane(row, 4 * i), lanes.from_lane(row, 4 * i + 4)
        for of_group in tl.static_range(2):
            at = signs_ptr + e % 32 * 4 + _signs_at(signs_ptr, second if of_group else first, 0, g, D, FAR)
            signs += (lanes.load_pair(at),)
        at = group_at(steps_ptr, tl.where(e % 4 < 2, first, second), g + 1, FAR) + e // 4 % 8 + e % 2 * 8
        steps += (tl.load(steps_ptr + at),)
    words = lanes.load_four(signs_ptr + e % 4 * 16 + _signs_at(signs_ptr, row, g, g, D, FAR))
    return signs, steps, words, tl.load(steps_ptr + group_at(steps_ptr, row, g + 1, FAR) + g)


@triton.jit
def _steps_of_tokens(steps):
    """Steps of tokens ``e // 4 % 8`` and ``e // 4 % 8 + 8`` of each of a warp's 8 groups: 8 pairs of float32 ``[E]``.

    steps: one tensor ``[E]`` per pair of groups, from `_load_lanes`. Lane ``2 i + j`` of four adjacent ones holds the
    step of token ``e // 4 % 8 + 8 * j`` of group i of the pair.
    """
    result = ()
    for pair in tl.static_range(0, 4, 2):
        found = lanes.of_quads(steps[pair], steps[pair + 1])
        for i in tl.static_range(4):
            result += ((found[i % 2 * 2][i // 2], found[i % 2 * 2 + 1][i // 2]),)
    return result


@triton.jit
def _lane_scores(kept, planes, numbers, total, e):
    """Two terms of the scores of a warp's 8 groups, float32 ``[E]``: the best product of a group's tokens, and the
    product of its centre, both without the query's scale. Thread e has group ``e // 4 % 8`` and head ``e % 4``.
    """
    signs, steps, words, unit = kept
    best, steps = (), _steps_of_tokens(steps)
    for i in tl.static_range(8):
        first, second = lane_signs.sign_products(signs[i][0], signs[i][1], total * -COUNT, planes)
        best += (tl.maximum(first * steps[i][0], second * steps[i][1]),)
    # a centre's number is ``2 * code - _CENTRE``; the product with codes comes multiplied by 2 ** -20
    centre = lane_signs.centre_product(words, numbers) * 2.0**21 - total * _CENTRE
    return lanes.largest_of_rows(best, e) * (1 / COUNT), centre * unit.to(tl.float32)


@triton.jit
def _put_scores(at, s, there, top, total):
    """Store scores s where ``there``; return the largest scores and the sums of ``2 ** (score - largest)`` with them.

    Each place in a tile keeps its own: reducing every tile would make warps wait for each other.
    """
    tl.store(at, s, mask=there)
    s = tl.where(there, s, float("-inf"))
    larger = tl.maximum(top, s)
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    return larger, total * tl.exp2(top - safe) + tl.exp2(s - safe)


@triton.jit
def _store_total(top_ptr, total_ptr, top, total, inside):
    """Reduce results of `_put_scores`, ``[n, BR]``, over the n places of a tile and store them, one per query head."""
    larger = tl.max(top, 0)  # [BR]
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    tl.store(top_ptr, larger, mask=inside)
    tl.store(total_ptr, tl.sum(total * tl.exp2(top - safe[None, :]), 0), mask=inside)


@triton.jit
def recall_rotate_kernel(
    q_ptr, rotated_ptr, whole_ptr, rotation_ptr, s_qb, s_qh, K, R, D: tl.constexpr, BR: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Rotate and round queries of a width that is read `in_pieces`, see `put_queries`. Grid (B * K, tiles of BR heads).

    It is a kernel of its own because rotating is more code than scoring: with few groups per program, programs that
    also rotate take longer than both kernels. rotated: as in `recall_score_kernel`.
    """
    if EARLY:
        gdc_launch_dependents()
    head, r = tl.program_id(0).to(tl.int64), tl.program_id(1) * BR + tl.arange(0, BR)
    q_ptr += head // K * s_qb + head % K * R * s_qh
    whole_ptr = whole_ptr.to(tl.pointer_type(tl.int8)) + head * R * sign_pieces.query_bytes(D)
    if rotated_ptr is not None:
        rotated_ptr += head * R * D
    sign_pieces.put_queries(q_ptr, s_qh, r, R, rotation_ptr, rotated_ptr, whole_ptr, D)
    if EARLY:
        # a kernel that waits for this one also reads results of the kernel before it
        gdc_wait()


@triton.jit(do_not_specialize=("few", "enough", "least", "part", "of"))
def recall_score_kernel(
    q_ptr, signs_ptr, steps_ptr, seen_ptr, real_ptr, score_ptr, top_ptr, total_ptr, centre_ptr, centre_top_ptr,
    centre_total_ptr, rotated_ptr, whole_ptr, rotation_ptr, far_ptr, before_ptr,
    s_qb, s_qh, K, R, G, few, enough, window, scale, most_opened, least, part, of,
    g: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr, GROUPS: tl.constexpr, CAP: tl.constexpr,
    HAS_REAL: tl.constexpr, EARLY: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Write index scores of closed groups, float32 ``[B, H, GROUPS]``, and per split the largest score and the sum of
    ``2 ** (score - largest)``, float32 ``[B, H, S]``. Where all closed groups are opened (`wanted_groups`), no scores
    are written, and -inf and 0 per split. centre, centre_top, centre_total: the same for scores of centres, soft-capped
    with CAP, for the kernel that attends; None if it does not read them.

    Grid (S, B * K, tiles of BR query heads). Only ``few`` splits have work if there are fewer than ``enough`` tiles of
    groups. Scores include ``scale``, which holds log2(e). If the sums of rotated queries equal those of
    `condense.ops.recall.choice` to the bit, so do the scores, and those of centres before the cap. rotation: as in
    `recall_close_kernel`. far: page table of records; then scores are ``[H, G]``, a row's groups from its ``start`` on;
    None for arrays. rotated: float32 ``[B, H, D]``, output: rotated queries for the kernel that attends; None if it
    does not read them. whole: results of `recall_rotate_kernel` for widths that are read `in_pieces`.
    """
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, kvh = head // K, head % K
    this = row_of_step(seen_ptr, real_ptr, before_ptr, b, window, G, g, HAS_REAL, FAR is not None)
    t, all_closed, closed = this.t, this.all_closed, this.closed
    # no tiles, so no scores, where all closed groups are opened
    tiles = tl.where(wanted_groups(closed, most_opened, least, part, of) == closed, 0, tl.cdiv(closed, BG))
    S = tl.where(tiles < enough, few, tl.num_programs(0))
    T: tl.constexpr = triton.next_power_of_2(g)
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    of_split = (head * R + r) * tl.num_programs(0) + split  # [BR]
    if split >= S:
        none, zero = tl.full([BR], float("-inf"), tl.float32), tl.zeros([BR], tl.float32)
        tl.store(top_ptr + of_split, none, mask=r < R)
        tl.store(total_ptr + of_split, zero, mask=r < R)
        if centre_ptr is not None:
            tl.store(centre_top_ptr + of_split, none, mask=r < R)
            tl.store(centre_total_ptr + of_split, zero, mask=r < R)
        return
    signs_ptr += head_rows(signs_ptr, head, kvh, G, index_widths(g, D)[0], FAR)
    steps_ptr += head_rows(steps_ptr, head, kvh, G, g + 1, FAR)
    if FAR is None:
        of_scores = (head * R + r) * GROUPS
    else:
        of_scores = (kvh * R + r) * G + this.start
        far_ptr += b * FAR.s_table
    score_ptr += of_scores
    if centre_ptr is not None:
        centre_ptr += of_scores
    asked = tl.where(closed > 0, R, 0)
    # queries: parts [BR, bytes]; sums and unit: [BR]
    if sign_pieces.in_pieces(D):
        if EARLY:
            gdc_wait()
        whole_ptr = whole_ptr.to(tl.pointer_type(tl.int8)) + head * R * sign_pieces.query_bytes(D)
        queries, sums, unit = sign_pieces.load_queries(whole_ptr, r, asked, D)
    else:
        # every split rotates the queries again, by a matrix in the L2 cache, so that this kernel need not wait for the
        # one before it in the many steps that close no group
        if rotated_ptr is not None:
            rotated_ptr += head * R * D
        q_ptr += b * s_qb + kvh * R * s_qh
        queries, sums, unit = rotated_queries(q_ptr, s_qh, r, asked, rotation_ptr, rotated_ptr, split == 0, D)
    if EARLY:
        gdc_launch_dependents()
        # wait for the kernel that writes the index of a group that closes now; in pages other rows may read it too
        if (FAR is not None) | (t + 1 - window == all_closed * g):
            gdc_wait()
    lo, hi = tiles * split // S, tiles * (split + 1) // S
    # instructions for Hopper: only there the plan gives a tile HEADS query heads
    if EARLY and BR == HEADS:
        e = tl.arange(0, BG * BR)
        lanes.check_lanes(e)
        planes, numbers = lane_signs.query_planes(queries, BG * BR), lane_signs.query_numbers(queries, BG * BR)
        sums, unit = lanes.of_heads(sums, BG * BR), lanes.of_heads(unit * scale, BG * BR)
        score_ptr, inside = lanes.of_heads(score_ptr, BG * BR), lanes.of_heads(r, BG * BR) < R
        if centre_ptr is not None:
            centre_ptr = lanes.of_heads(centre_ptr, BG * BR)
        top, total = tl.full([BG * BR], float("-inf"), tl.float32), tl.zeros([BG * BR], tl.float32)
        centre_top, centre_total = top, total
        kept = _load_lanes(signs_ptr, steps_ptr, _found_by_lanes(far_ptr, lo * BG, closed, e, FAR), e, g, D, FAR)
        # rows are found two tiles ahead, and their index is loaded one tile ahead
        row = _found_by_lanes(far_ptr, (lo + 1) * BG, closed, e, FAR)
        for tile in range(lo, hi):
            next_row = _found_by_lanes(far_ptr, (tile + 2) * BG, closed, e, FAR)
            ahead = _load_lanes(signs_ptr, steps_ptr, row, e, g, D, FAR)
            of_tokens, centre = _lane_scores(kept, planes, numbers, sums, e)
            s = (of_tokens + centre) * unit  # [BG * BR]
            group = tile * BG + e // BR
            there = (group < closed) & inside
            top, total = _put_scores(score_ptr + group, s, there, top, total)
            if centre_ptr is not None:
                s = soft_cap(centre * unit, CAP)[0]
                centre_top, centre_total = _put_scores(centre_ptr + group, s, there, centre_top, centre_total)
            kept, row = ahead, next_row
        top, total = tl.reshape(top, (BG, BR)), tl.reshape(total, (BG, BR))
        centre_top, centre_total = tl.reshape(centre_top, (BG, BR)), tl.reshape(centre_total, (BG, BR))
    else:
        n = tl.arange(0, BG * T)
        i = tl.minimum(n % T, g - 1)
        # rows are found, and their steps loaded, one tile ahead
        row = _found(far_ptr, lo * BG + n // T, closed, FAR)
        step = _load_steps(steps_ptr, row, i, closed, g, FAR)  # [BG * T]
        for tile in range(lo, hi):
            next_row = _found(far_ptr, (tile + 1) * BG + n // T, closed, FAR)
            next_step = _load_steps(steps_ptr, next_row, i, closed, g, FAR)
            if sign_pieces.in_pieces(D):
                signs = sign_pieces.load_pieces(signs_ptr + _signs_at(signs_ptr, row, i, g, D, FAR), D)
                s = sign_pieces.piece_sign_products(signs, queries, sums, step, D, EARLY)  # [BG * T, BR]
            else:
                signs = _load_signs(signs_ptr, row, i, g, D, FAR)  # [BG * T, bytes]
                s = sign_products(signs, queries, sums, step, EARLY)
            best = tl.max(tl.reshape(s, (BG, T, BR)), 1)  # [BG, BR]
            group = tile * BG + tl.arange(0, BG)
            tl.store(score_ptr[None, :] + group[:, None], best, mask=(group < closed)[:, None] & (r < R)[None, :])
            row, step = next_row, next_step
        # scores are read again, from the cache, to add the centres' products: a tile above has too few groups for an
        # efficient product
        tl.debug_barrier()
        last = tl.minimum(hi * BG, closed)
        top = tl.full([_ADDED, BR], float("-inf"), tl.float32)
        total = tl.zeros([_ADDED, BR], tl.float32)
        centre_top, centre_total = top, total
        for start in range(lo * BG, last, _ADDED):
            group = start + tl.arange(0, _ADDED)
            found = _found(far_ptr, group, closed, FAR)
            at, there = score_ptr[None, :] + group[:, None], (group < last)[:, None] & (r < R)[None, :]
            codes_at = _signs_at(signs_ptr, found, g, g, D, FAR)
            if sign_pieces.in_pieces(D):
                centre = sign_pieces.piece_centre_products(signs_ptr + codes_at, queries, sums, D, EARLY)
            else:
                centre = centre_products(signs_ptr, codes_at, queries, sums, D, EARLY)
            centre *= _load_steps(steps_ptr, found, g, closed, g, FAR)[:, None]
            s = (tl.load(at, mask=there, other=0.0) + centre) * (unit * scale)[None, :]  # [_ADDED, BR]
            top, total = _put_scores(at, s, there, top, total)
            if centre_ptr is not None:
                s, at = soft_cap(centre * (unit * scale)[None, :], CAP)[0], centre_ptr[None, :] + group[:, None]
                centre_top, centre_total = _put_scores(at, s, there, centre_top, centre_total)
    _store_total(top_ptr + of_split, total_ptr + of_split, top, total, r < R)
    if centre_ptr is not None:
        _store_total(centre_top_ptr + of_split, centre_total_ptr + of_split, centre_top, centre_total, r < R)
    if EARLY:
        # a kernel that waits for this one also reads results of the kernel before it
        gdc_wait()
