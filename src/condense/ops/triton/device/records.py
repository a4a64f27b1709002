"""Records that kernels build on their first lines, so that functions take a few records and not many arguments.

Numbers are launch arguments of their own, not in tuples: ``do_not_specialize`` does not reach into tuples, so each new
value would compile a new kernel. No field is None, which Triton 3.6 does not allow in a record.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rule(NamedTuple):
    """The numbers of `condense.ops.spans.UniformRule`."""

    chunk: Any
    window: Any
    entries: Any
    max_chunks: Any


class Start(NamedTuple):
    """Where a row starts, as `condense.ops.spans.Start`."""

    query: Any
    window: Any
    padding: Any
    first_entries: Any


class Spans(NamedTuple):
    """The spans of all queries: the rule and the start of the program's row, or an array int32 ``[sources, 2, B|1, K|1,
    L]``, lo and hi of each source, with its strides; the first is twice the second and the last is 1, so not given.
    """

    rule: Rule
    start: Start
    arrays: Any
    strides: Any


class Source(NamedTuple):
    """Keys and values in parts (`condense.ops.triton.device.parts`), as descriptors ``[B, K, N, width]``, and the batch
    row and KV head to read. level: base-2 number added to the scores of all entries; bias_at: where the row's biases
    begin among those of all rows.
    """

    k: Any
    v: Any
    b: Any
    head: Any
    level: Any
    bias_at: Any


class Softmax(NamedTuple):
    """An online softmax per row: weighted values in parts, the largest score (base 2), the sum of weights."""

    acc: Any
    m: Any
    total: Any


class Row(NamedTuple):
    """Batch row and KV head of a program."""

    b: Any
    head: Any


class Queries(NamedTuple):
    """Queries and the gradient of their output, in parts, and the two numbers per row of the backward pass.

    Tiles and vectors for dq; descriptors and pointers where a program walks through the queries.
    """

    q: Any
    d_out: Any
    lse: Any
    delta: Any


class Sources(NamedTuple):
    """All sources by pointers, strides, sizes and levels, one per source in each field."""

    k: Any
    v: Any
    dk: Any
    dv: Any
    s_k: Any
    s_v: Any
    s_bias: Any
    sizes: Any
    levels: Any


class Block(NamedTuple):
    """A block of keys of one source: pointers, offsets of its rows (``at``: in rows, of the contiguous gradients),
    which of them exist, their base-2 bias, and the queries ``[first, last)`` that see each.
    """

    k: Any
    v: Any
    dk: Any
    dv: Any
    k_at: Any
    v_at: Any
    at: Any
    inside: Any
    bias: Any
    first: Any
    last: Any


class Keys(NamedTuple):
    """Keys and values of a block, in parts, with its bias and the queries that see them."""

    k: Any
    v: Any
    bias: Any
    first: Any
    last: Any
