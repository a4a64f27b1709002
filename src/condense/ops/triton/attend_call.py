"""The arguments of the attention operations, in the forms that torch operations and kernels take.

Shapes: B rows of the batch, H query heads, K KV heads, R = H / K, L queries, N entries of a source, D and Dv widths.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from condense.ops.spans import RuleSpans, Source, Spans, UniformRule
from condense.ops.triton.host import LOG2E, check_programs, dense_rows, whole_rows
from condense.ops.triton.recall_choice import OpenedGroups, opened
from condense.ops.types import AttendOptions

# most bytes of words (a bit per query and group) for a block of queries
_WORDS = 2**27
# stands for "no limit" in kernels: more tokens than any row has, and a sum of three such numbers still fits in 32 bits
_UNLIMITED = 1 << 29
# types of a record's fields in the schema of a torch operation
_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", Sequence[Tensor]: "Tensor[]", Sequence[int]: "SymInt[]",
    Sequence[float]: "float[]", int: "SymInt", float: "float", bool: "bool",
}  # fmt: skip


def blocks(L: int, size: int, lead: int) -> list[tuple[int, int]]:
    """Blocks ``[first, stop)`` of L queries: one of the first ``lead``, if any, then blocks of up to ``size``."""
    return list(itertools.pairwise([*([0] if lead > 0 else []), *range(min(lead, L), L, size), L]))


class AttendCall(NamedTuple):
    """The arguments of the attention operations: fields of all sources as lists, and spans as `describe` returns them.

    biases: a tensor float ``[B|1, K|1, N]`` for each source whose entries have biases of their own.
    bias_of: for each source the index of its tensor in ``biases``, -1 for none.
    levels: for each source the one bias that all of its entries share, 0.0 for none.

    groups: int32 ``[B, K|1, L, r]``, the groups that each query opens, from `condense.ops.triton.recall_choice.choose`;
    None if queries see all that their spans hold. With groups, the sources are store and window, and queries see those
    closed groups of the store that they open; closed is the most closed groups of any query. asked: as in
    `condense.ops.triton.recall_choice.marked`; groups then has a list per query that chooses, and there are no
    gradients. lead: queries of a first block, behind which tiles begin, so that few tiles hold queries of three lists.
    """

    q: Tensor
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    biases: Sequence[Tensor]
    bias_of: Sequence[int]
    levels: Sequence[float]
    spans: Tensor | None
    rule: Sequence[int]
    scale: float
    softcap: float = 0.0
    groups: Tensor | None = None
    closed: int = 0
    asked: Tensor | None = None
    lead: int = 0

    @property
    def group_size(self) -> int:
        """Tokens per group."""
        return self.rule[0]

    @property
    def num_groups(self) -> int:
        """Groups in the store."""
        return self.k[0].shape[2] // self.group_size

    @property
    def kind(self) -> str:
        """The kind of the spans, see `condense.ops.triton.device.rule`."""
        return "row" if self.spans is None else "rows" if self.spans.ndim == 2 else "arrays"

    def blocks(self, tile: int) -> Iterator[tuple[int, int, OpenedGroups | None]]:
        """Blocks ``[first, stop)`` of queries, in whole tiles of ``tile`` queries, and the groups that each one opens.

        With groups, the words of a block take at most `_WORDS` bytes; without groups, there is one block.
        """
        L = self.q.shape[2]
        if self.groups is None:
            yield 0, L, None
            return
        # a word for each group takes at most 8 bytes
        step = max(1, _WORDS // (8 * self.groups.shape[0] * self.groups.shape[1] * self.closed)) * tile
        for first, stop in blocks(L, step, self.lead):
            yield first, stop, opened(self.groups, self.num_groups, self.closed, tile, first, stop, self.asked)


_SCHEMA = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(AttendCall).items())


class AttendShared:
    """Numbers and tensors that every kernel of a call takes. Strides are 0 in dimensions of size 1.

    q, k, v: rows aligned to 16 bytes (`whole_rows`), those of the store contiguous. biases: per source, float32 times
    log2(e), None without any; s_bias: their strides. levels: base 2. spans, s_spans: see `describe`.
    """

    def __init__(self, call: AttendCall) -> None:
        """Raise ValueError for more rows times heads than a grid holds."""
        self.call, self.q, self.K = call, whole_rows(call.q), call.k[0].shape[1]
        self.R = call.q.shape[1] // self.K
        check_programs(call.q.shape[0] * self.K)
        near = 0 if call.groups is None else 1  # the first source behind the store
        self.k, self.v = ([*map(dense_rows, x[:near]), *not_empty(x[near:])] for x in (call.k, call.v))
        # a source without entries gets no bias either
        known = [(x.float() * LOG2E).contiguous() if x.shape[2] > 0 else None for x in call.biases]
        self.biases = tuple([None if n < 0 else known[n] for n in call.bias_of])
        self.s_bias = tuple([(0, 0) if x is None else strides_of(x) for x in self.biases])
        self.spans, self.s_spans = call.q if call.spans is None else call.spans, (0, 0, 0)
        if call.spans is not None and call.kind == "arrays":
            self.s_spans = (call.spans.stride(1), *strides_of(call.spans))
        self.levels = tuple([x * LOG2E for x in call.levels])


def strides_of(x: Tensor) -> tuple[int, int]:
    """Strides of batch and KV head of ``[..., B|1, K|1, n]``, 0 for a dimension of size 1."""
    return (0 if x.shape[-3] == 1 else x.stride(-3), 0 if x.shape[-2] == 1 else x.stride(-2))


def not_empty(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Keys or values of the sources in rows aligned to 16 bytes; an empty source gets one row that no query sees."""
    other = next((x for x in tensors if x.shape[2] > 0), None)
    if other is None:
        return [x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in tensors]
    return [whole_rows(x if x.shape[2] > 0 else other[:, :, :1]) for x in tensors]


def results(q: Tensor, v: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Empty tensors for output ``[B, H, L, Dv]`` and log-sum-exp ``[B, H, L]``.

    The output lies as ``[B, L, H, Dv]``, so that the output projection reads it without a copy.
    """
    B, H, L, _ = q.shape
    return q.new_empty(B, L, H, v[0].shape[3]).transpose(1, 2), q.new_empty(B, H, L, dtype=torch.float32)


def describe(spans: Spans, num_sources: int, L: int, device: torch.device) -> tuple[Tensor | None, list[int]]:
    """Spans as kernels take them: a tensor on the device or None, and eight numbers, the fields of a `UniformRule` and
    those of a `condense.ops.spans.RowStart`.

    The tensor is None if all rows have the same start; int32 ``[B, 4]``, the start of each row; or, for spans without
    a uniform rule, int32 ``[sources, 2, B|1, K|1, L]``, lo and hi of each source, and the numbers are not used.
    """
    if not isinstance(spans, RuleSpans) or not isinstance(spans.rule, UniformRule):
        ends = torch.broadcast_tensors(*(x for span in spans.at(0, L, device) for x in span))
        return torch.stack(ends).unflatten(0, (-1, 2)).to(torch.int32), [1, 1, 1, 1, 0, 0, 0, 0]
    assert num_sources == 2, "the uniform rule has the entries and the window"
    rule = spans.rule
    window, max_chunks = (_UNLIMITED if x is None else min(x, _UNLIMITED) for x in (rule.window, rule.max_chunks))
    numbers = [min(rule.chunk, _UNLIMITED), window, rule.entries, max_chunks]
    start = spans.same_in_all_rows()
    if start is not None:
        return None, [*numbers, *start]
    return spans.starts().to(device, torch.int32, non_blocking=True), [*numbers, 0, 0, 0, 0]


def call_of(q: Tensor, sources: Sequence[Source], spans: Spans, scale: float, softcap: float = 0.0) -> AttendCall:
    """Return the `AttendCall` of these arguments. A scale that is not above 0 is moved to q."""
    described = describe(spans, len(sources), q.shape[2], q.device)
    k, v = [source.k for source in sources], [source.v for source in sources]
    biases, numbers = [source.bias for source in sources if isinstance(source.bias, Tensor)], itertools.count()
    bias_of = [next(numbers) if isinstance(source.bias, Tensor) else -1 for source in sources]
    levels = [0.0 if source.bias is None or isinstance(source.bias, Tensor) else source.bias for source in sources]
    if scale <= 0:  # the kernels need scale > 0, so the sign (or the zero) goes into q
        q, scale = q * (-1.0 if scale < 0 else 0.0), -scale or 1.0
    return AttendCall(q, k, v, biases, bias_of, levels, *described, scale, softcap)


def needs_operation(q: Tensor, *others: Tensor) -> bool:
    """True if autograd, torch.compile or a subclass of Tensor is involved, which need a torch operation.

    Otherwise the kernel is called directly: dispatching the operation takes longer than all other host work.
    """
    if torch.compiler.is_compiling() or type(q) is not Tensor:
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others))


class Attention:
    """A backend's attention: ``forward`` of an `AttendCall`, and the same as a torch operation of the call's fields.

    torch.compile does not trace into the operation. ``backward``, from `backward_operation`, computes gradients of the
    first four fields.
    """

    def __init__(
        self, name: str, forward: Callable[[AttendCall], tuple[Tensor, Tensor]], backward: Callable[..., list[Tensor]]
    ) -> None:
        self.forward = forward
        self.operation = torch.library.custom_op(
            f"condense::{name}", lambda *fields: forward(AttendCall(*fields)), mutates_args=(),
            schema=f"({_SCHEMA}) -> (Tensor, Tensor)",
        )  # fmt: skip
        self.operation.register_fake(lambda q, k, v, *_: results(q, v))

        def differentiate(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
            out, lse, *tensors = ctx.saved_tensors
            leaves = [number if x is None else x for x, number in zip(tensors, ctx.numbers, strict=True)]
            fields = tree_unflatten(leaves, ctx.structure)
            grads = iter(backward(d_out, d_lse, out, lse, *fields))
            of_fields = (tree_map_only(Tensor, lambda _: next(grads), x) for x in fields[:4])
            return *of_fields, *[None] * (len(fields) - 4)

        self.operation.register_autograd(differentiate, setup_context=_keep)

    def run(self, call: AttendCall) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp, by the torch operation if `needs_operation`, else by the kernel directly."""
        if not needs_operation(call.q, *call.k, *call.v, *call.biases):
            return self.forward(call)
        return self.operation(*call)

    def attend(
        self, q: Tensor, sources: Sequence[Source], spans: Spans, options: AttendOptions
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, see `condense.ops.attend`."""
        assert options.dropout_p == 0, "the backend's limits"
        return self.run(call_of(q, sources, spans, options.scale, options.softcap))


def backward_operation(backward: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Register ``backward(d_out, d_lse, out, lse, call)`` as a torch operation that takes the call's fields.

    It returns contiguous gradients of all tensors in the first four fields of the `AttendCall`.
    """
    op = torch.library.custom_op(
        "condense::attend_backward", lambda *x: backward(*x[:4], AttendCall(*x[4:])), mutates_args=(),
        schema=f"(Tensor d_out, Tensor d_lse, Tensor out, Tensor lse, {_SCHEMA}) -> Tensor[]",
    )  # fmt: skip
    op.register_fake(
        lambda *x: [torch.empty_like(leaf, memory_format=torch.contiguous_format) for leaf in tree_leaves(x[4:8])]
    )
    return op


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    leaves, ctx.structure = tree_flatten(inputs)
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in leaves]
    ctx.save_for_backward(*output, *(x if isinstance(x, Tensor) else None for x in leaves))
