"""The tokens of groups that queries open, as a tile of rows reads them.

A word per group, with a bit per query of a tile, says which queries open it:
`condense.ops.triton.recall_choice_kernels`.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, G groups of g tokens, T tiles of Q queries.
BM rows and BN keys per tile.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from condense.ops.triton.device.parts import load_rows

# not specialised: these numbers differ between blocks of queries, and a new value must not compile a new kernel
BLOCK = ("first", "stop", "room")


class OpenForm(NamedTuple):
    """The constants of a call in which queries open groups.

    R: query heads per KV head. g: tokens per group.
    """

    R: int
    g: int


class TileGroups(namedtuple("TileGroups", "group word count bit store s_store row")):
    """The groups that the queries of a tile open.

    group: pointer to the groups that any query opens. word: pointer to the words of these. count: how many these are.
    bit: the row's bit mask within a word. store: pointers to exact keys and values; s_store: three strides of each;
    row: whose they are.
    """


@triton.jit
def chooser(row, choosers):
    """Index of the list of open groups for a KV head; heads share one list per batch row if ``choosers`` is 1.

    choosers: lists per batch row, 1 or one per KV head.
    """
    return row.b.to(tl.int64) * choosers + tl.minimum(row.head, choosers - 1)


@triton.jit
def groups_of(lists, room, store, s_store, row, choosers, i, Q: tl.constexpr):
    """The `TileGroups` of a program. lists: pointers to the `condense.ops.triton.recall_choice.OpenedGroups`, i: number
    of each row's query among those that these are of.
    """
    group_ptr, word_ptr, count_ptr = lists
    tile = chooser(row, choosers) * tl.num_programs(0) + tl.num_programs(0) - 1 - tl.program_id(0)
    return TileGroups(
        group_ptr + tile * room, word_ptr + tile * room, tl.load(count_ptr + tile),
        tl.full(i.shape, 1, word_ptr.dtype.element_ty) << (i % Q), store, s_store, row,
    )  # fmt: skip


@triton.jit
def over_opened(
    ADD: tl.constexpr, state, queries, groups, scale, g: tl.constexpr, WIDTHS: tl.constexpr, BN: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state with the tokens of all groups that a query of the tile opens, counted through; a row sees those of its
    query. ADD: adds keys to a state, `condense.ops.triton.attend_forward.add_keys` or the like.
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
