"""The entries of closed groups, and the tokens of groups that queries open, as a tile of rows reads them.

A row sees the entries of closed groups that its query does not open, and the tokens of those that it opens. A word per
group, with a bit per query of a tile, says which queries open it: `condense.ops.triton.recall_choice_kernels`.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, G groups of g tokens, T tiles of Q queries.
BM rows and BN keys per tile.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from condense.ops.triton.device.parts import load_block, load_rows
from condense.ops.triton.recall_choice_kernels import row_of_words

# not specialised: these numbers differ between blocks of queries, and a new value must not compile a new kernel
BLOCK = ("first", "stop", "words", "room")


class OpenForm(NamedTuple):
    """The constants of a call in which queries open groups.

    R: query heads per KV head. g: tokens per group. pool: whether queries see the entries of groups they do not open.
    """

    R: int
    g: int
    pool: bool


class TileGroups(namedtuple("TileGroups", "words size group word count bit store s_store row")):
    """The groups that the queries of a tile open.

    words: pointer to a word per closed group; size: how many these are. group: pointer to the groups that any query
    opens. word: pointer to the words of these. count: how many these are. bit: the row's bit mask within a word. store:
    pointers to exact keys and values; s_store: three strides of each; row: whose they are.
    """


@triton.jit
def where_seen(x, seen, other):
    """x ``[n, m]`` where it is seen, else ``other``.

    seen: a tuple, empty if all is; of a mask ``[n, m]``; or of numbers ``[m]`` and the ends of spans ``[first, last)``
    of them, both ``[n]``, that are seen.
    """
    if len(seen) == 0:
        return x
    elif len(seen) == 1:
        return tl.where(seen[0], x, other)
    else:
        return tl.where((seen[0][None, :] >= seen[1][:, None]) & (seen[0][None, :] < seen[2][:, None]), x, other)


@triton.jit
def load_biases(bias):
    """Biases ``[1, BN]`` of a block of entries. bias: a pointer to those of all rows, base 2, the `RowSource`, and the
    block's first entry.
    """
    biases, source, start = bias
    n = start + tl.arange(0, source.k[0].block_shape[2])
    return tl.load(biases + source.bias_at + n, mask=n < source.k[0].shape[2], other=0.0)[None, :]


@triton.jit
def chooser(row, choosers):
    """Index of the list of open groups for a KV head; heads share one list per batch row if ``choosers`` is 1.

    choosers: lists per batch row, 1 or one per KV head.
    """
    return row.b.to(tl.int64) * choosers + tl.minimum(row.head, choosers - 1)


@triton.jit
def groups_of(lists, words, room, store, s_store, row, choosers, i, Q: tl.constexpr):
    """The `TileGroups` of a program. lists: pointers to the tensors of `condense.ops.triton.recall_choice`."""
    words_ptr, group_ptr, word_ptr, count_ptr = lists
    tile = chooser(row, choosers) * tl.num_programs(0) + tl.num_programs(0) - 1 - tl.program_id(0)
    return TileGroups(
        words_ptr + tile * row_of_words(words), words, group_ptr + tile * room, word_ptr + tile * room,
        tl.load(count_ptr + tile), tl.full(i.shape, 1, words_ptr.dtype.element_ty) << (i % Q), store, s_store, row,
    )  # fmt: skip


@triton.jit
def _entries_between(
    ADD: tl.constexpr, state, queries, source, biases, groups, stretch, closed, scale,
    MASKED: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state with a stretch ``[lo, hi)`` of entries. MASKED: the closed groups of some row may end among them."""
    BN: tl.constexpr = source.k[0].block_shape[2]
    for start in range(stretch[0], stretch[1], BN):
        n = start + tl.arange(0, BN)
        k = load_block(source.k, [source.b, source.head, start, 0], BN)  # [BN, D]
        v = load_block(source.v, [source.b, source.head, start, 0], BN)  # [BN, Dv]
        # a row of words is padded to whole blocks
        seen = (tl.load(groups.words + n)[None, :] & groups.bit[:, None]) == 0  # [BM, BN]
        if MASKED:
            seen = seen & (n[None, :] < closed[:, None])
        bias = (biases, source, start) if biases is not None else ()
        state = ADD(state, queries, k, v, (seen,), source.level, bias, scale, CAP, PRECISION)
    return state


@triton.jit
def over_entries(
    ADD: tl.constexpr, state, queries, source, biases, groups, closed, scale, CAP: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The state with the entries of closed groups; a row sees those of groups that it does not open.

    ADD: adds keys to a state, `condense.ops.triton.attend_forward.add_keys` or the like. biases: None for none.
    closed ``[BM]``: closed groups of each row.
    """
    closed = tl.minimum(closed, groups.size)
    BN: tl.constexpr = source.k[0].block_shape[2]
    whole = tl.min(closed) // BN * BN
    state = _entries_between(
        ADD, state, queries, source, biases, groups, (0, whole), closed, scale, False, CAP, PRECISION
    )
    return _entries_between(
        ADD, state, queries, source, biases, groups, (whole, tl.max(closed)), closed, scale, True, CAP, PRECISION
    )


@triton.jit
def over_opened(
    ADD: tl.constexpr, state, queries, groups, scale, g: tl.constexpr, WIDTHS: tl.constexpr, BN: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state with the tokens of all groups that a query of the tile opens, counted through; a row sees those of its
    query. ADD: as of `over_entries`.
    """
    store, strides, b, kvh = groups.store, groups.s_store, groups.row.b.to(tl.int64), groups.row.head.to(tl.int64)
    k_ptr, v_ptr = store[0] + b * strides[0] + kvh * strides[1], store[1] + b * strides[3] + kvh * strides[4]
    for start in range(0, groups.count * g, BN):
        t = start + tl.arange(0, BN)
        inside = t < groups.count * g
        group = tl.load(groups.group + t // g, mask=inside, other=0)
        word = tl.load(groups.word + t // g, mask=inside, other=0)
        token = (group * g + t % g).to(tl.int64)
        k = load_rows(k_ptr, token * strides[2], inside, WIDTHS[0], WIDTHS[1])  # [BN, D]
        v = load_rows(v_ptr, token * strides[5], inside, WIDTHS[2], WIDTHS[3])  # [BN, Dv]
        seen = (word[None, :] & groups.bit[:, None]) != 0  # [BM, BN]
        state = ADD(state, queries, k, v, (seen,), 0.0, (), scale, CAP, PRECISION)
    return state
