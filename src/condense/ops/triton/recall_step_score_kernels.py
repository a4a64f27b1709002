"""Kernel of Recall's decode step that scores the index of closed groups, and one that rotates wide queries before it.

Shapes and names as in `condense.ops.triton.recall_step_kernels`. A tile holds T tokens of each of BG groups; T is g
as a power of two, and the last token of a group fills it up. Where a GPU counts bits, a warp reads 8 groups at a time
instead, for 4 query heads (`condense.ops.triton.device.lane_signs`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from condense.ops.recall.index import CENTRE_LEVELS
from condense.ops.triton.device import lane_signs, lanes, sign_pieces
from condense.ops.triton.device.address import form_place, head_rows, part_at, place_row
from condense.ops.triton.device.lane_signs import COUNT
from condense.ops.triton.device.lanes import HEADS
from condense.ops.triton.device.parts import tile_width
from condense.ops.triton.device.signs import centre_products, index_widths, rotated_queries, sign_bytes, sign_products
from condense.ops.triton.device.softmax import soft_cap
from condense.ops.triton.recall_choice_kernels import wanted_groups
from condense.ops.triton.recall_close_kernels import row_of_step

_CENTRE = tl.constexpr(float(CENTRE_LEVELS))
# groups whose centres are multiplied, and scores added up, at a time
_ADDED = tl.constexpr(64)


@triton.jit
def _found(far_ptr, group, closed, FAR: tl.constexpr):
    """Numbers of groups, or the places of their records; beyond the closed groups those of the last one."""
    row = tl.minimum(group, closed - 1)
    return row if FAR is None else form_place(far_ptr, row, closed > 0, FAR)


@triton.jit
def _of_index(ptr, row, SIZE: tl.constexpr, FAR: tl.constexpr):
    """Offsets of what an index has of the groups that `_found` gives, SIZE numbers of each."""
    return row.to(tl.int64) * SIZE if FAR is None else part_at(ptr, place_row(row, FAR))


@triton.jit
def _load_steps(steps_ptr, row, i, closed, g: tl.constexpr, FAR: tl.constexpr):
    """Steps i of the groups that `_found` gives, of which the last is the centre's; 0 if no group is closed."""
    return tl.load(steps_ptr + _of_index(steps_ptr, row, g + 1, FAR) + i, mask=closed > 0, other=0.0).to(tl.float32)


@triton.jit
def _signs_at(signs_ptr, row, i, g: tl.constexpr, D: tl.constexpr, FAR: tl.constexpr):
    """Offsets of the signs of tokens i of the groups that `_found` gives; those of token g are the centre's codes."""
    return _of_index(signs_ptr, row, index_widths(g, D)[0], FAR) + i * sign_bytes(D)


@triton.jit
def _load_signs(signs_ptr, row, i, g: tl.constexpr, D: tl.constexpr, FAR: tl.constexpr):
    """Bytes of signs of tokens i of the groups that `_found` gives."""
    W: tl.constexpr = sign_bytes(D)
    c = tl.arange(0, tile_width(W))
    at = signs_ptr + _signs_at(signs_ptr, row, i, g, D, FAR)[:, None] + c[None, :]  # [n, bytes]
    return tl.load(at) if tile_width(W) == W else tl.load(at, mask=(c < W)[None, :], other=0)


@triton.jit
def _found_by_lanes(far_ptr, first, closed, e, FAR: tl.constexpr):
    """Numbers or places of groups ``first + e // 4``, ``[E]``, as `_found` gives them."""
    return tl.maximum(_found(far_ptr, first + e // 4, closed, FAR), 0)


@triton.jit
def _load_lanes(signs_ptr, steps_ptr, row, e, g: tl.constexpr, D: tl.constexpr, FAR: tl.constexpr):
    """The index of the 8 groups of a warp, which `_found_by_lanes` finds: for each group words of signs of its tokens,
    for `lane_signs.sign_products`; for each two groups a step, for `_steps_of_tokens`; words and step of the centre of
    a thread's group, for `lane_signs.centre_product`.
    """
    signs, steps = (), ()
    for i in tl.static_range(0, 8, 2):
        # each group is found by four lanes, which tell the others
        first, second = lanes.from_lane(row, 4 * i), lanes.from_lane(row, 4 * i + 4)
        for of_group in tl.static_range(2):
            at = signs_ptr + e % 32 * 4 + _signs_at(signs_ptr, second if of_group else first, 0, g, D, FAR)
            signs = signs + (lanes.load_pair(at, 128),)  # noqa: RUF005
        at = _of_index(steps_ptr, tl.where(e % 4 < 2, first, second), g + 1, FAR) + e // 4 % 8 + e % 2 * 8
        steps = steps + (tl.load(steps_ptr + at),)  # noqa: RUF005
    words = lanes.load_four(signs_ptr + e % 4 * 16 + _signs_at(signs_ptr, row, g, g, D, FAR))
    return signs, steps, words, tl.load(steps_ptr + _of_index(steps_ptr, row, g + 1, FAR) + g)


@triton.jit
def _steps_of_tokens(steps):
    """Steps of tokens ``e // 4 % 8`` of the 8 groups of a warp, and of those 8 further on, from steps as `_load_lanes`
    loads them: lane ``2 i + j`` of four has, of the i-th of two groups, that of the token 8 j further on.
    """
    result = ()
    for pair in tl.static_range(0, 4, 2):
        found = lanes.of_quads(steps[pair], steps[pair + 1])
        for i in tl.static_range(4):
            result = result + ((found[i % 2 * 2][i // 2], found[i % 2 * 2 + 1][i // 2]),)  # noqa: RUF005
    return result


@triton.jit
def _lane_scores(kept, planes, numbers, total, e):
    """Scores of 8 groups in whole numbers of the query, ``[E]``: group ``e // 4 % 8`` of the warp, head ``e % 4``. They
    are sums of what is returned: of the best of a group's tokens, and of its centre.
    """
    signs, steps, words, unit = kept
    best, steps = (), _steps_of_tokens(steps)
    for i in tl.static_range(8):
        first, second = lane_signs.sign_products(signs[i][0], signs[i][1], total * -COUNT, planes)
        best = best + (tl.maximum(first * steps[i][0], second * steps[i][1]),)  # noqa: RUF005
    # a number is twice its code, less a constant
    centre = lane_signs.centre_product(words, numbers) * 2.0**21 - total * _CENTRE
    return lanes.largest_of_rows(best, e) * (1 / COUNT), centre * unit.to(tl.float32)


@triton.jit
def _added(top, total, s):
    """The largest scores, and the sums of ``2 ** (score - largest)``, with more scores, -inf where there are none.

    Kept per place in a tile: to join them, warps would wait for each other.
    """
    larger = tl.maximum(top, s)
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    return larger, total * tl.exp2(top - safe) + tl.exp2(s - safe)


@triton.jit
def _store_total(top_ptr, total_ptr, top, total, inside):
    """Store what `_added` gives for each query head, of all places ``[n, BR]``."""
    larger = tl.max(top, 0)  # [BR]
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    tl.store(top_ptr, larger, mask=inside)
    tl.store(total_ptr, tl.sum(total * tl.exp2(top - safe[None, :]), 0), mask=inside)


@triton.jit
def recall_rotate_kernel(
    q_ptr, rotated_ptr, whole_ptr, rotation_ptr, s_qb, s_qh, K, R, D: tl.constexpr, BR: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Rotate queries that `in_pieces` are multiplied, see `put_queries`; grid (B * K, tiles of BR query heads).

    Rotating is more code than scoring: programs that did both for few groups each ended later. rotated: as of
    `recall_score_kernel`.
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
        # a kernel that waits for this one also needs what the one before this one wrote
        gdc_wait()


@triton.jit(do_not_specialize=("few", "enough", "least", "part", "of"))
def recall_score_kernel(
    q_ptr, signs_ptr, steps_ptr, seen_ptr, real_ptr, score_ptr, top_ptr, total_ptr, centre_ptr, centre_top_ptr,
    centre_total_ptr, rotated_ptr, whole_ptr, rotation_ptr, far_ptr, before_ptr,
    s_qb, s_qh, K, R, G, few, enough, window, scale, most_opened, least, part, of,
    g: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr, GROUPS: tl.constexpr, CAP: tl.constexpr,
    HAS_REAL: tl.constexpr, EARLY: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Write index scores of closed groups, float32 ``[B, H, GROUPS]``; and for every split the largest score, and the
    sum of ``2 ** (score - largest)``. centre, centre_top, centre_total: the same of the scores of centres, soft-capped
    with CAP, for the kernel that attends; None: it does not read them.

    Grid (S, B * K, tiles of BR query heads), of which only ``few`` splits have work if there are fewer tiles of groups
    than ``enough``. Scores are those of `condense.ops.recall.choice` to the bit, those of centres before the cap, for
    this ``scale``, which holds log2(e), if the sums of rotated queries are the same to the bit. Where all closed groups
    are opened, no scores are written: `condense.ops.recall.choice.Quota`. rotation: as for `recall_close_kernel`. far:
    table of the pages of records, for which scores are ``[H, G]``, with the groups of a row from its ``start`` on; None
    for arrays. rotated: float32 ``[B, H, D]``, where rotated queries are written for the kernel that attends; None: it
    does not read them. whole: those that `recall_rotate_kernel` wrote, where they are `in_pieces`.
    """
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, kvh = head // K, head % K
    this = row_of_step(seen_ptr, real_ptr, before_ptr, b, window, G, g, HAS_REAL, FAR is not None)
    t, all_closed, closed = this.t, this.all_closed, this.closed
    # nobody asks for scores where all closed groups are opened
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
    # [BR, bytes], [BR], [BR]
    if sign_pieces.in_pieces(D):
        if EARLY:
            gdc_wait()
        whole_ptr = whole_ptr.to(tl.pointer_type(tl.int8)) + head * R * sign_pieces.query_bytes(D)
        queries, sums, unit = sign_pieces.load_queries(whole_ptr, r, asked, D)
    else:
        # each split rotates queries anew, from a matrix in the L2 cache: if the kernel before this one rotated them,
        # this one would have to wait for it, but runs beside it in most steps, which close no group
        if rotated_ptr is not None:
            rotated_ptr += head * R * D
        q_ptr += b * s_qb + kvh * R * s_qh
        queries, sums, unit = rotated_queries(q_ptr, s_qh, r, asked, rotation_ptr, rotated_ptr, split == 0, D)
    if EARLY:
        gdc_launch_dependents()
        # the kernel before this one closes a group, and writes its index; in pages, one that another row may read too
        if (FAR is not None) | (t + 1 - window == all_closed * g):
            gdc_wait()
    lo, hi = tiles * split // S, tiles * (split + 1) // S
    # such tensor cores, programmatic launches and assembly are what a GPU has and the interpreter has not
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
        # found two tiles ahead, and loaded one
        row = _found_by_lanes(far_ptr, (lo + 1) * BG, closed, e, FAR)
        for tile in range(lo, hi):
            next_row = _found_by_lanes(far_ptr, (tile + 2) * BG, closed, e, FAR)
            ahead = _load_lanes(signs_ptr, steps_ptr, row, e, g, D, FAR)
            of_tokens, centre = _lane_scores(kept, planes, numbers, sums, e)
            s = (of_tokens + centre) * unit  # [BG * BR]
            group = tile * BG + e // BR
            there = (group < closed) & inside
            tl.store(score_ptr + group, s, mask=there)
            top, total = _added(top, total, tl.where(there, s, float("-inf")))
            if centre_ptr is not None:
                s = soft_cap(centre * unit, CAP)[0]
                tl.store(centre_ptr + group, s, mask=there)
                centre_top, centre_total = _added(centre_top, centre_total, tl.where(there, s, float("-inf")))
            kept, row = ahead, next_row
        top, total = tl.reshape(top, (BG, BR)), tl.reshape(total, (BG, BR))
        centre_top, centre_total = tl.reshape(centre_top, (BG, BR)), tl.reshape(centre_total, (BG, BR))
    else:
        n = tl.arange(0, BG * T)
        i = tl.minimum(n % T, g - 1)
        # found and loaded one tile ahead
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
        # read again, from the cache, in larger tiles: those of centres would be small beside those of their tokens
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
            tl.store(at, s, mask=there)
            top, total = _added(top, total, tl.where(there, s, float("-inf")))
            if centre_ptr is not None:
                s = soft_cap(centre * (unit * scale)[None, :], CAP)[0]
                tl.store(centre_ptr[None, :] + group[:, None], s, mask=there)
                centre_top, centre_total = _added(centre_top, centre_total, tl.where(there, s, float("-inf")))
    _store_total(top_ptr + of_split, total_ptr + of_split, top, total, r < R)
    if centre_ptr is not None:
        _store_total(centre_top_ptr + of_split, centre_total_ptr + of_split, centre_top, centre_total, r < R)
    if EARLY:
        # a kernel that waits for this one also needs what the one before this one wrote
        gdc_wait()
