"""Kernel of Recall's decode step that attends: to the ring's tokens, to the open groups, and to the one token that
stands for the other closed groups (`condense.ops.recall.rest`).

A step is five kernels: close a group (`condense.ops.triton.recall_close_kernels`), score the index
(`recall_step_score_kernels`), choose the groups to open (`recall_step_choice_kernels`), attend, and join the splits
(`step_join_kernel`). Each waits for the one before it and reads its results; there are no atomics. For some latents
another kernel rotates the queries before they are scored, and on Hopper another reads the open groups
(`condense.ops.triton.latent_groups_kernels`).

Shapes: B rows, K KV heads, R query heads per KV head, G groups that buffers have room for, g tokens per group, W slots
of the rings, S splits, D and Dv widths, P: a width rounded up to a power of two for tiles, V columns of the output. BR
rows (query heads) per tile. "head" is a KV head of a row, b * K + kvh. All buffers of the state are contiguous. Scores
are base 2.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from condense.ops.triton import recall_store_kernels as stores
from condense.ops.triton.device import address, lane_tokens, lanes
from condense.ops.triton.device.address import of_group
from condense.ops.triton.device.codes import MIDDLE, from_words, to_words
from condense.ops.triton.device.parts import load_rows, parts, products, tile_width, zeros
from condense.ops.triton.device.signs import block_width, index_widths, rotated_part
from condense.ops.triton.device.softmax import Softmax, key_products, soft_cap, store_part
from condense.ops.triton.recall_choice_kernels import wanted_groups
from condense.ops.triton.recall_close_kernels import after_the_last, row_of_step


class _Opened(namedtuple("_Opened", "groups count table signs steps")):
    """The open groups of one KV head. groups: pointer to their numbers; count: how many. table: pointer to the row's
    page table of records; not read without pages. signs, steps: pointers to the head's signs and steps in the index.
    """


@triton.jit
def _load_part(at, LO: tl.constexpr, N: tl.constexpr):
    """Load columns ``[LO, LO + N)`` of the rows that begin at pointers ``at`` ``[n]``: ``[n, P]``, 0 past the last."""
    d = LO + tl.arange(0, tile_width(N))
    if tile_width(N) == N:
        return tl.load(at[:, None] + d[None, :])  # [n, P]
    else:
        return tl.load(at[:, None] + d[None, :], mask=(d < LO + N)[None, :], other=0.0)


@triton.jit
def _load_rows(at, D0: tl.constexpr, D1: tl.constexpr):
    """Load whole rows in parts; as `load_rows` does, but rows found by pointers take fewer instructions here."""
    first = _load_part(at, 0, D0)
    return parts(first, _load_part(at, D0, D1) if D1 > 0 else None)


@triton.jit
def _transposed(acc):
    """Accumulators in parts, each transposed: from ``[V, BR]`` to ``[BR, V]``, or back."""
    return [tl.trans(x) for x in acc]


@triton.jit
def _scores(q, k, PRECISION: tl.constexpr):
    """Products of keys with queries ``[BN, BR]``."""
    return tl.trans(key_products(q, k, PRECISION)) if PRECISION == "ieee" else products(k, q, PRECISION)


@triton.jit
def _add(softmax, s, v, step, PRECISION: tl.constexpr):
    """Add BN keys to the online softmax: scores s ``[BN, BR]``, -inf for keys that are not seen; values v, multiplied
    by ``step`` ``[BN]`` unless it is None. Also returns the weights ``[BN, BR]`` and the factor ``[BR]`` by which
    earlier sums were multiplied.
    """
    m = tl.maximum(softmax.m, tl.max(s, 0))
    safe = tl.where(m == float("-inf"), 0.0, m)
    p, alpha = tl.exp2(s - safe[None, :]), tl.exp2(softmax.m - safe)  # [BN, BR], [BR]
    weights = (p if step is None else p * step[:, None]).to(v[0].dtype)
    acc = ()
    for part in tl.static_range(len(v)):
        x = softmax.acc[part] * alpha[None, :]  # [columns, BR]
        acc += (tl.dot(tl.trans(v[part]), weights, x, input_precision=PRECISION),)
    return Softmax(acc, m, softmax.total * alpha[None, :] + p), p, alpha


@triton.jit
def _add_keys(softmax, q, k, v, offset, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Add keys k and values v to the softmax. offset ``[BN]``: added to scores; 0, or -inf for keys not seen."""
    s = soft_cap(_scores(q, k, PRECISION) * scale, CAP)[0] + offset[:, None]  # [BN, BR]
    return _add(softmax, s, v, None, PRECISION)[0]


@triton.jit
def _open_groups(opened, n, FAR: tl.constexpr):
    """Rows of open groups n: the groups' numbers, int64, or in pages the places (`form_place`) of their records. n past
    the last open group stands for the last one.
    """
    group = tl.load(opened.groups + tl.minimum(n, opened.count - 1), mask=opened.count > 0, other=0)
    return group.to(tl.int64) if FAR is None else address.form_place(opened.table, group, opened.count > 0, FAR)


@triton.jit
def _put_bases(
    base_ptr, q, opened, first, last, inside, FORM: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """Write the products of queries with the centres of open groups ``[first, last)``, and wait until all threads of
    the program can read them. base_ptr ``[BR]``: where each query head's products begin, one per open group. inside
    ``[BR]``: which query heads exist.
    """
    columns: tl.constexpr = index_widths(FORM.g, FORM.D)
    for start in range(first, last, 16):
        n = start + tl.arange(0, 16)
        row = _open_groups(opened, n, FAR)
        x = stores.load_centres(of_group(opened.signs, row, columns[0], FAR), q[0].dtype, FORM, EARLY)  # [16, P]
        unit = 2 * tl.load(of_group(opened.steps, row, columns[1], FAR) + FORM.g).to(tl.float32)  # [16]
        s = _scores(q, x, PRECISION) * unit[:, None]  # [16, BR]
        tl.store(base_ptr[None, :] + n[:, None], s, mask=inside[None, :] & (n < last)[:, None])
    tl.debug_barrier()


@triton.jit
def _lane_bases(base_ptr, n, last, inside):
    """Load products that `_put_bases` wrote for open group n: ``[E]`` for each of a thread's query heads; 0 from
    ``last`` on.
    """
    base = ()
    for s in tl.static_range(len(base_ptr)):
        base += (tl.load(base_ptr[s] + n, mask=inside[s] & (n < last), other=0.0),)
    return base


@triton.jit
def _load_lanes(opened, row, store_ptr, e, FORM: tl.constexpr, FAR: tl.constexpr):
    """Load the `LaneGroup` of an open group. row: from `_open_groups`."""
    columns: tl.constexpr = index_widths(FORM.g, FORM.D)
    piece, signs = of_group(store_ptr, row, FORM.piece, FAR, True), of_group(opened.signs, row, columns[0], FAR)
    return lane_tokens.load_group(piece, signs, e, opened.steps.dtype.element_ty, FORM)


@triton.jit
def _lane_groups(
    sums, opened, lo, kept, store_ptr, queries, base_ptr, inside, scale, FORM: tl.constexpr, CAP: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """Add open groups from ``lo`` on to ``sums``, the `LaneSums` of one warp. kept: the first of these groups, from
    `_load_lanes`. queries: rotated, from `lane_tokens.lane_queries`. base_ptr ``[BR]``: as in `_put_bases`.
    """
    e, hi = tl.arange(0, 32), opened.count
    lanes.check_lanes(e)
    base_ptr, inside = lane_tokens.of_threads(base_ptr), lane_tokens.of_threads(inside)
    base = _lane_bases(base_ptr, lo, hi, inside)
    row = _open_groups(opened, lo + 1, FAR)
    for n in range(lo, hi):
        # rows are found two groups ahead, and groups are loaded one ahead
        next_row = _open_groups(opened, n + 2, FAR)
        ahead = kept
        if n + 1 < hi:
            # the branch keeps the compiler from moving these loads to the end of the iteration, where nothing runs
            # while they are under way
            ahead = _load_lanes(opened, row, store_ptr, e, FORM, FAR)
        next_base = _lane_bases(base_ptr, n + 1, hi, inside)
        sums = lane_tokens.add_group(sums, queries, kept, base, scale, e, CAP)
        kept, base, row = ahead, next_base, next_row
    return sums


@triton.jit
def _with_lanes(softmax, sums):
    """The softmax over its own keys and those of `LaneSums`."""
    acc, m, total = lane_tokens.whole_sums(sums)  # [V, BR], [BR], [BR]
    larger = tl.maximum(softmax.m, m)
    before, now = tl.exp2(softmax.m - larger), tl.exp2(m - larger)
    # the BN rows of ``total`` are added up at the end, so the lanes' total goes to one of them
    first = (tl.arange(0, softmax.total.shape[0]) == 0)[:, None]
    total = softmax.total * before[None, :] + tl.where(first, (total * now)[None, :], 0.0)
    return Softmax((softmax.acc[0] * before[None, :] + acc * now[None, :],), larger, total)


@triton.jit
def _rotated(softmax, rotation_ptr, FORM: tl.constexpr):
    """The softmax with its sums ``[BR, V]`` of latents rotated, as sums over stored latents are."""
    acc = rotated_part(softmax.acc[0], rotation_ptr, 0, FORM.V0, FORM.D, False, "tf32x3")
    return Softmax((acc * (1 / block_width(FORM.D)),), softmax.m, softmax.total)


class Centres(namedtuple("Centres", "score top total splits")):
    """Scores of centres that `condense.ops.triton.recall_step_score_kernels` wrote for one KV head.

    score: pointers ``[BR]`` to the scores of each query head. top, total: pointers to the largest score and the sum of
    each of the ``splits`` splits, of the KV head's first query head.
    """


@triton.jit
def _log_rest(centres, groups_ptr, count, some, r, R, BM: tl.constexpr, EARLY: tl.constexpr):
    """Base-2 logarithm ``[BR]`` of the sum of ``2 ** score`` over the centres of all closed groups but the ``count``
    open ones; -inf where none is left. r ``[BR]``: query heads, of R. BM: splits, and then open groups, read at once.
    some: whether any group is left; if not, there are no scores to read. EARLY: wait for the kernel that chooses groups
    before their list is read; the sums over all centres are complete earlier.
    """
    splits, count = tl.where(some, centres.splits, 0), tl.where(some, count, 0)
    inside, n = (r < R)[None, :], tl.arange(0, BM)
    top = tl.full([BM, r.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([BM, r.shape[0]], tl.float32)
    for start in range(0, splits, BM):
        at = r[None, :] * splits + (start + n)[:, None]
        there = inside & (start + n < splits)[:, None]
        own = tl.load(centres.top + at, mask=there, other=float("-inf"))  # [BM, BR]
        larger = tl.maximum(top, own)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        total *= tl.exp2(top - safe)
        total += tl.load(centres.total + at, mask=there, other=0.0) * tl.exp2(own - safe)
        top = larger
    largest = tl.max(top, 0)  # [BR]
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    rest = tl.sum(total * tl.exp2(top - largest[None, :]), 0)  # [BR]
    total = tl.zeros([BM, r.shape[0]], tl.float32)
    after_the_last(EARLY)
    # group numbers are loaded one tile ahead, so that loads of scores need not wait for them
    group = tl.load(groups_ptr + n, mask=n < count, other=0)  # [BM]
    for start in range(0, count, BM):
        there, behind = (start + n < count)[:, None], start + BM + n
        next_group = tl.load(groups_ptr + behind, mask=behind < count, other=0)
        score = tl.load(centres.score[None, :] + group[:, None], mask=inside & there, other=float("-inf"))  # [BM, BR]
        total += tl.exp2(score - largest[None, :])
        group = next_group
    # the difference has the rounding error of the sum over all groups, so it may lie below 0. Beside the whole softmax
    # the error is small: the open groups' tokens, which it sees, weigh about as much as the centres subtracted here
    rest -= tl.sum(total, 0)
    return tl.where(rest > 0, largest + tl.log2(tl.where(rest > 0, rest, 1.0)), float("-inf"))


@triton.jit
def _load_mean(sums, j, there, FORM: tl.constexpr, LO: tl.constexpr, N: tl.constexpr, NEAR: tl.constexpr):
    """Load columns ``[LO, LO + N)`` of the mean value of the first j groups, float32 ``[1, P]``; 0 if not ``there``."""
    d = LO + tl.arange(0, tile_width(N))
    there = there & (d < LO + N)
    WIDTH: tl.constexpr = FORM.DV if FORM.DV > 0 else FORM.D
    ptr = address.sum_columns(sums, j, d, there, WIDTH, FORM.g, NEAR)  # [P]
    return (tl.load(ptr, mask=there, other=0.0) / tl.maximum(FORM.g * j, 1).to(tl.float64)).to(tl.float32)[None, :]


@triton.jit
def rest_of(
    centres, sums, groups_ptr, count, closed, j, r, R,
    BM: tl.constexpr, FORM: tl.constexpr, EARLY: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """The `Softmax` of BR query heads over the one token that stands for the closed groups that are not open; -inf as
    its largest score where all are open.

    groups: the list of ``count`` open groups. sums: `condense.ops.triton.device.address.HeadSums`, of which the sum
    over the first j groups is read. Other arguments as in `_log_rest`.
    """
    one, some = tl.full([r.shape[0]], 1.0, tl.float32), count < closed
    mean = one[:, None] * _load_mean(sums, j, some, FORM, 0, FORM.V0, NEAR)  # [BR, P]
    mean = parts(mean, one[:, None] * _load_mean(sums, j, some, FORM, FORM.V0, FORM.V1, NEAR) if FORM.V1 > 0 else None)
    weight = _log_rest(centres, groups_ptr, count, some, r, R, BM, EARLY)
    return Softmax(mean, weight + tl.log2(one * FORM.g), one)


@triton.jit(do_not_specialize=("least", "part", "of", "mean_tiles"))
def recall_attend_kernel(
    q_ptr, signs_ptr, steps_ptr, store_ptr, ring_k_ptr, ring_v_ptr, sums_ptr, slots_ptr, rotated_ptr, rotation_ptr,
    base_ptr, groups_ptr, place_ptr, centre_ptr, centre_top_ptr, centre_total_ptr, seen_ptr, real_ptr, part_ptr,
    lse_ptr, near_ptr, far_ptr, before_ptr,
    s_qb, s_qh, K, R, G, W, N, num_sums, window, most_opened, least, part, of, own, ahead, mean_tiles, s_centre, splits,
    slots, scale,
    HAS_SLOTS: tl.constexpr, FORM: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    APART: tl.constexpr, HAS_REAL: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, EARLY: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Write each split's attention, part float32 ``[B, H, S, V]``, and its base-2 log-sum-exp, float32 ``[B, H, S]``.

    Grid (S, B * K, tiles of BR query heads). APART: another kernel (`condense.ops.triton.latent_groups_kernels`) reads
    the open groups; part and lse begin with its ``ahead`` splits.

    A split attends to its share of two lists: the ring's tokens that are in no closed group, then the tokens of open
    groups, both BN at a time. own: the first ``own`` splits read open groups alone, the others the ring alone; 0: every
    split reads both. BM > 0: the last split also attends to the mean, the one token that stands for the closed groups
    that are not open. It reads BM splits of centres' scores at a time, of the ``splits`` that `recall_score_kernel`
    wrote, then BM scores, whose rows are ``s_centre`` long; and one of the ring's ``num_sums`` sums. Its share of open
    groups is ``mean_tiles`` tiles smaller; if that is 0, it reads neither list.

    most_opened, least, part, of: fields of `condense.ops.recall.choice.Quota`; most_opened is also the row stride of
    ``groups`` and ``place``. near, far: page tables of tokens and of records; with them scores and lists of groups are
    laid out as in `recall_score_kernel` and `recall_choose_kernel`. Stores of fewer than 16 bits also need rotated, the
    rotated queries, float32 ``[B, H, D]``; rotation, `condense.ops.recall.index.rotation` in the dtype of q; and base,
    scratch memory for one number per query head and open group.
    """
    split, S, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    b, kvh = head // K, head % K
    g: tl.constexpr = FORM.g
    D: tl.constexpr = FORM.D
    DV: tl.constexpr = FORM.DV
    this = row_of_step(seen_ptr, real_ptr, before_ptr, b, window, G, g, HAS_REAL, FAR is not None)
    t, live, all_closed, closed = this.t, this.live, this.all_closed, this.closed
    first = all_closed * g
    # limited to the ring, because a replayed graph may run more steps than the cache has room for
    tokens = tl.where(live, tl.minimum(t + 1 - first, W), 0)
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    part_row = (head * R + r) * (ahead + S) + ahead + split
    count = wanted_groups(closed, most_opened, least, part, of)
    groups_ptr += head * most_opened if FAR is None else kvh * G + this.start
    if NEAR is None:
        ring_k_ptr += head * W * D
        ring_v_ptr += head * W * DV
    else:
        near_ptr += b * NEAR.s_table
        far_ptr += b * FAR.s_table
        ring_k_ptr += kvh * NEAR.s_head
        ring_v_ptr += kvh * NEAR.s_head
    tiles, lane = tl.cdiv(tokens, BN), tl.arange(0, BN)
    q = load_rows(q_ptr + b * s_qb + kvh * R * s_qh, r.to(tl.int64) * s_qh, r < R, FORM.D0, FORM.D1)  # [BR, D]
    # tensor cores take rows by 16 and columns by 8: keys are the rows, as few query heads share a KV head
    acc = _transposed(zeros(BR, FORM.V0, FORM.V1))  # [V, BR]
    softmax = Softmax(acc, tl.full([BR], float("-inf"), tl.float32), tl.zeros([BN, BR], tl.float32))
    if BM > 0:
        # alone: the last split reads the mean and nothing else
        alone, is_last = mean_tiles == 0, split == S - 1
        if is_last:
            scores, of_head = ((head if FAR is None else kvh) * R + r) * s_centre + this.start, head * R * splits
            centres = Centres(centre_ptr + scores, centre_top_ptr + of_head, centre_total_ptr + of_head, splits)
            sums = address.head_sums(sums_ptr, head, kvh, num_sums, near_ptr, DV if DV > 0 else D, NEAR)
            # with APART, the kernel before this one waited for the choice before it allowed this launch
            waits: tl.constexpr = EARLY and not APART
            rest = rest_of(centres, sums, groups_ptr, count, closed, (t + 1) // g, r, R, BM, FORM, waits, NEAR)
            total = tl.where((lane == 0)[:, None], rest.total[None, :], 0.0)
            softmax = Softmax(_transposed(rest.acc), rest.m, total)
        if is_last & alone & (not APART):
            mean = Softmax(_transposed(softmax.acc), softmax.m, tl.sum(softmax.total, 0))
            store_part(part_ptr, lse_ptr, mean, part_row, r < R, FORM.V0, FORM.V1)
            return
        S -= alone.to(tl.int32)
        mean_tiles = tl.where(count < closed, mean_tiles, 0)
    share, shares = tl.maximum(split - own, 0), S - own
    lo, hi = tiles * share // shares, tl.minimum(tiles * (share + 1) // shares, tiles)
    hi = tl.where(split < own, lo, hi)
    BY_LANES: tl.constexpr = EARLY and q_ptr.dtype.element_ty.is_bf16() and BR <= 8
    LANES: tl.constexpr = BY_LANES and lane_tokens.fits(FORM.bits, g, D, DV, BN, HAS_SLOTS)
    oldest = first % W
    if NEAR is not None:
        # the page table is read one tile ahead, so that loads of keys need not wait for it
        place = address.tile_in_pages(near_ptr, first, tokens, lo, BN, NEAR)
    for tile in range(lo, hi):
        n = tile * BN + lane
        if NEAR is None:
            # places past the last key read that key again
            slot = oldest + tl.minimum(n, tokens - 1)
            at_k = tl.where(slot >= W, slot - W, slot).to(tl.int64)
            at_k, at_v = at_k * D, at_k * DV
        else:
            at_k, at_v = place, place
        k = _load_rows(ring_k_ptr + at_k, FORM.D0, FORM.D1)  # [BN, D]
        v = (k[0],) if DV == 0 else _load_rows(ring_v_ptr + at_v, FORM.V0, FORM.V1)
        offset = tl.where(n < tokens, 0.0, float("-inf"))
        softmax = _add_keys(softmax, q, k, v, offset, scale, CAP, PRECISION)
        if NEAR is not None:
            place = address.tile_in_pages(near_ptr, first, tokens, tile + 1, BN, NEAR)
    if APART:
        near = Softmax((tl.trans(softmax.acc[0]),), softmax.m, tl.sum(softmax.total, 0))
        store_part(part_ptr, lse_ptr, _rotated(near, rotation_ptr, FORM), part_row, r < R, FORM.V0, FORM.V1)
        # the next kernel joins the splits of both kernels, and rotates the result back
        after_the_last(EARLY)
        return
    # three products of tf32 are as exact as one of float32
    EXACT: tl.constexpr = "ieee" if PRECISION == "ieee" else "tf32x3"
    # sums of unscaled codes would be too large or too small for float16
    WORDS: tl.constexpr = stores.in_words(FORM) and not q_ptr.dtype.element_ty.is_fp16()
    if FORM.bits < 16:
        # keys of the store are rotated, and so are values that are columns of keys. Rotated queries are divided by the
        # width of the rotation's blocks, and products multiplied by it, so that float16 holds all numbers
        is_rotated = (r < R) & (count > 0)  # before the first group closes, rotated queries may not be written
        rotated = load_rows(rotated_ptr + head * R * D, r.to(tl.int64) * D, is_rotated, FORM.D0, FORM.D1)
        q = [(x * (1 / block_width(D))).to(q[0].dtype) for x in rotated]
        scale *= block_width(D)
        if DV == 0:
            acc = rotated_part(tl.trans(softmax.acc[0]), rotation_ptr, 0, FORM.V0, D, False, EXACT)
            softmax = Softmax((tl.trans(acc * (1 / block_width(D))),), softmax.m, softmax.total)
    place_ptr += head * most_opened
    store_ptr += address.head_rows(store_ptr, head, kvh, N // g, FORM.piece, FAR, True)
    columns: tl.constexpr = index_widths(g, D)
    signs_ptr += address.head_rows(signs_ptr, head, kvh, G, columns[0], FAR)
    steps_ptr += address.head_rows(steps_ptr, head, kvh, G, columns[1], FAR)
    slots_ptr += head * slots * FORM.piece
    # a tile has T tokens of each of BG groups
    T: tl.constexpr = stores.tokens_of_tile(g, BN)
    BG: tl.constexpr = BN // T
    PARTS: tl.constexpr = (g + T - 1) // T
    opened = _Opened(groups_ptr, count, groups_ptr if FAR is None else far_ptr, signs_ptr, steps_ptr)
    tiles = tl.cdiv(count, BG) * PARTS
    shares = tl.where(own > 0, own, S)
    share, shared = tl.minimum(split, shares), tiles + mean_tiles
    lo, hi = tl.minimum(shared * share // shares, tiles), tl.minimum(shared * (share + 1) // shares, tiles)
    n, token = tl.arange(0, BG), tl.arange(0, T)
    if WORDS:
        room = most_opened if FAR is None else G
        base_ptr += head * R * room if FAR is None else kvh * R * room + this.start
        base_ptr += r * room
        q = to_words(q[0], D)  # [BR, D // 4]
        behind = tl.minimum(tl.cdiv(hi, PARTS) * BG, count)
    if LANES:
        queries, sums = lane_tokens.lane_queries(rotated[0] * (1 / block_width(D))), lane_tokens.no_sums(BR // 4)
    # wait for the kernel that chooses groups. It allowed this launch once the kernels before it had ended: the ring and
    # the rotated queries, which are read above, were complete
    after_the_last(EARLY)
    if LANES:
        # the first group is loaded while bases are computed. The split's groups end at hi
        opened = _Opened(groups_ptr, hi, opened.table, signs_ptr, steps_ptr)
        kept = _load_lanes(opened, _open_groups(opened, lo, FAR), store_ptr, tl.arange(0, 32), FORM, FAR)
    if WORDS:
        _put_bases(base_ptr, q, opened, lo // PARTS * BG, behind, r < R, FORM, PRECISION, EARLY, FAR)
    if LANES:
        sums = _lane_groups(sums, opened, lo, kept, store_ptr, queries, base_ptr, r < R, scale, FORM, CAP, FAR)
    else:
        if WORDS:  # in four parts [V // 4, BR]
            softmax = Softmax(_transposed(to_words(tl.trans(softmax.acc[0]), DV)), softmax.m, softmax.total)
        shift = tl.zeros([BN, BR], tl.float32)
        # rows are found one tile ahead, so that loads of tokens need not wait for the list
        row = _open_groups(opened, lo // PARTS * BG + n, FAR)
        for tile in range(lo, hi):
            at, start = tile // PARTS * BG + n, tile % PARTS * T
            piece = of_group(store_ptr, row, FORM.piece, FAR, True)
            signs, steps = of_group(signs_ptr, row, columns[0], FAR), of_group(steps_ptr, row, columns[1], FAR)
            pieces = stores.Pieces(piece, piece, n < 0, signs, steps)
            row = _open_groups(opened, (tile + 1) // PARTS * BG + n, FAR)
            if HAS_SLOTS:
                # `_find_slots` of `recall_step_choice_kernels` explains these numbers
                found = tl.load(place_ptr + at, mask=at < count, other=-1)
                slot = slots_ptr + (found >> 1).to(tl.int64) * FORM.piece
                held = (found >= 0) & (found % 2 == 0)
                pieces = stores.Pieces(tl.where(held, slot, piece), slot, (found >= 0) & (found % 2 == 1), signs, steps)
            seen = (at < count)[:, None] & (start + token < g)[None, :]  # [BG, T]
            offset = tl.reshape(tl.where(seen, 0.0, float("-inf")), (BN,))
            if WORDS:
                at = tile // PARTS * BG + lane // T
                there = (r < R)[None, :] & (at < behind)[:, None]
                base = tl.load(base_ptr[None, :] + at[:, None], mask=there, other=0.0)  # [BN, BR]
                words = stores.load_words(pieces, start, T, q[0].dtype, FORM, HAS_SLOTS, EARLY)
                s = _scores(q, words.k, PRECISION) * words.unit[:, None] + base
                s = soft_cap(s * scale, CAP)[0] + offset[:, None]
                softmax, p, alpha = _add(softmax, s, words.v, words.step, PRECISION)
                # weighted sums of zero + MIDDLE * step, the part of a value that is equal in all its columns
                shift = shift * alpha[None, :] + p * (words.zero + MIDDLE * words.step)[:, None]
            else:
                k, v = stores.load_groups(pieces, start + token, q[0].dtype, FORM, HAS_SLOTS)  # [BN, D], [BN, V]
                softmax = _add_keys(softmax, q, k, v, offset, scale, CAP, PRECISION)
        if WORDS:
            # added to all columns of all parts
            shift = tl.sum(shift, 0)[None, :]
            acc = _transposed([x + shift for x in softmax.acc])
            softmax = Softmax((tl.trans(from_words(acc, DV)),), softmax.m, softmax.total)
    if LANES:
        softmax = _with_lanes(softmax, sums)
    acc = _transposed(softmax.acc)
    if FORM.bits < 16 and DV == 0:
        acc = (rotated_part(acc[0], rotation_ptr, 0, FORM.V0, D, True, EXACT),)
    total = tl.sum(softmax.total, 0)
    # splits without a key write zeros, because the join reads every part
    store_part(part_ptr, lse_ptr, Softmax(acc, softmax.m, total), part_row, r < R, FORM.V0, FORM.V1)
