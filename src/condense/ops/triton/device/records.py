"""Records that kernels build on their first lines, so that functions take a few records and not many arguments.

Numbers are launch arguments of their own, not in tuples: ``do_not_specialize`` does not reach into tuples, so each new
value would compile a new kernel. No field is None, which Triton 3.6 does not allow in a record.
"""

from collections import namedtuple


class Rule(namedtuple("Rule", "chunk window entries max_chunks")):
    """The fields of `condense.ops.spans.UniformRule`."""


class Start(namedtuple("Start", "query window padding first_entries")):
    """The fields of `condense.ops.spans.RowStart`."""


class RowSpans(namedtuple("RowSpans", "rule start arrays strides")):
    """The spans of a program's queries, by a rule or from an array.

    rule, start: the rule and the start of the program's row. arrays: pointer to lo and hi of each source, int32
    ``[sources, 2, B|1, K|1, L]``. strides: of its second, third and fourth dimension; that of ``sources`` is twice the
    first of these, and that of L is 1.
    """


class RowSource(namedtuple("RowSource", "k v b head level bias_at")):
    """One source as a program reads it.

    k, v: descriptors ``[B, K, N, width]`` in parts (`condense.ops.triton.device.parts`). b, head: the batch row and KV
    head to read. level: base-2 number added to the scores of all entries. bias_at: offset of this row's biases.
    """


class Row(namedtuple("Row", "b head")):
    """Batch row ``b`` and KV head ``head`` of a program."""


class BackwardQueries(namedtuple("BackwardQueries", "q d_out lse delta")):
    """Queries of the backward pass: tiles and vectors for dq, descriptors and pointers for dk and dv.

    q: queries, d_out: gradients of their outputs, both in parts. lse, delta: two numbers per row, as
    `condense.ops.triton.attend_backward` explains.
    """


class Sources(namedtuple("Sources", "k v dk dv s_k s_v s_bias sizes levels")):
    """All sources: pointers, strides, sizes and levels, each field a tuple with one item per source."""


class Block(namedtuple("Block", "k v dk dv k_at v_at at inside bias first last")):
    """A block of keys of one source.

    k, v, dk, dv: pointers. k_at, v_at: offsets of the rows of k and v. at: numbers of the rows of dk and dv, which are
    contiguous. inside: whether a key exists. bias: base 2. first, last: queries ``[first, last)`` see the key.
    """


class Keys(namedtuple("Keys", "k v bias first last")):
    """Loaded keys and values of a `Block`, in parts; bias, first, last: as there."""
