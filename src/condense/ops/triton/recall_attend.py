"""The `triton` backend of Recall's attention over a prompt: forward and backward, deterministic.

Shapes: B rows, H query heads, K KV heads, R = H / K, L queries, G groups of g tokens, N window tokens, r groups that a
query opens, D and Dv widths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condense.ops.recall.choice import Choice, IndexChoice, chosen_groups
from condense.ops.recall.sources import RecallSources
from condense.ops.spans import RuleSpans, UniformRule
from condense.ops.triton.attend import Tiles, attend, small_tiles
from condense.ops.triton.attend_call import describe, needs_operation, not_empty, results, row_strides
from condense.ops.triton.descriptors import described
from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import LOG2E, cdiv, check_programs, dense_rows, on_device_of, power_of_2, whole_rows
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_attend_kernels import recall_dq_kernel, recall_fwd_kernel
from condense.ops.triton.recall_backward_kernels import recall_dkv_kernel, recall_store_kernel
from condense.ops.triton.recall_choice import Positions, Scoring, choice_arguments, choice_operation, choose, score
from condense.ops.triton.recall_opened import Opened, opened

_FORWARD, _DQ = Launcher(recall_fwd_kernel), Launcher(recall_dq_kernel)
_DKV, _DSTORE = Launcher(recall_dkv_kernel), Launcher(recall_store_kernel)
# bytes of the words that say which queries of a block open which groups
_WORDS = 2**29


@functools.cache
def _tiles(kernel: str, dtype: torch.dtype, is_cuda: bool, widest: int, R: int) -> Tiles:
    """Tiles by kernel, dtype, width and heads per KV head.

    Those of "fwd" and "dq" have the queries whose choices share a word; "dkv" reads them in parts. Of keys and values
    expanded from latents, 192 and 128 wide, 32 at a time took 80 ms where 64 took 144 (128K tokens, 16 heads, H200).
    """
    if (small := small_tiles(kernel, dtype, is_cuda, R)) is not None:
        return small
    if kernel == "dkv":
        return Tiles(32, 64, {"num_warps": 4 if widest <= 128 else 8, "num_stages": 3 if widest <= 128 else 2})
    if kernel == "store":
        return Tiles(64, 64, {"num_warps": 4, "num_stages": 2 if widest <= 128 else 1})
    if kernel == "fwd" and widest <= 128 and R > 1:  # a word has up to 64 bits, of a query each
        return Tiles(128, 32, {"num_warps": 4, "num_stages": 2})
    if kernel == "fwd" and R == 1 and 128 < widest <= 192:
        return Tiles(64, 32, {"num_warps": 4, "num_stages": 2})
    return Tiles(64, 64, {"num_warps": 4 if widest <= 128 else 8, "num_stages": 2})


class Call(NamedTuple):
    """The arguments of the operations. k, v: of entries, store and window; biases float ``[B|1, K|1, G]``: the entries'
    own, None for none; groups int32 ``[B, K|1, L, r]``, as `choose` gives them; closed: no query sees more groups as
    closed; level: added to all scores of entries.
    """

    q: Tensor
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    biases: Tensor | None
    groups: Tensor
    starts: Tensor | None
    rule: Sequence[int]
    closed: int
    level: float
    pool: bool
    scale: float
    softcap: float = 0.0

    @property
    def heads(self) -> tuple[int, int]:
        """KV heads, and how many of them choose groups: each, or 1 for all."""
        return self.k[0].shape[1], self.groups.shape[1]

    @property
    def group_size(self) -> int:
        """Tokens per group."""
        return self.k[1].shape[2] // self.k[0].shape[2]

    @property
    def kind(self) -> str:
        """As of `Positions`."""
        return "row" if self.starts is None else "rows"

    @property
    def numerics(self) -> tuple[str, float]:
        """Precision of products; soft cap of scores, base 2."""
        # tf32x3, three products of the matrix units, is within the error of PyTorch's float32 attention
        return "tf32x3" if self.q.dtype == torch.float32 else "tf32", self.softcap * LOG2E

    def constants(self, *more: float | str) -> tuple[float | str, ...]:
        """Widths, in parts, and what follows."""
        return *split_width(self.q.shape[3]), *split_width(self.v[0].shape[3]), *more

    def opened(self, tile: int, first: int, stop: int) -> Opened:
        """What tiles of queries open."""
        return opened(self.groups, self.k[0].shape[2], self.closed, tile, first, stop)

    def blocks(self, tile: int) -> Iterator[tuple[int, int, Opened]]:
        """Blocks ``[first, stop)`` of queries whose words have a limited size, and what their tiles open."""
        B, K, L, _ = self.groups.shape
        # a word for each group takes at most 8 bytes
        step = max(1, _WORDS // (8 * B * K * max(self.closed, 1))) * tile
        for first in range(0, L, step):
            stop = min(first + step, L)
            yield first, stop, self.opened(tile, first, stop)


class _Shared(NamedTuple):
    """Tensors, strides and numbers that the kernels of a call share, in the order in which they take them."""

    sources: tuple[Any, ...]
    s_store: tuple[int, ...]
    biases: Tensor | None
    s_bias: tuple[int, int]

    @classmethod
    def of(cls, call: Call, keys: int) -> _Shared:
        """keys: rows of a tile of entries and window."""
        of_k, of_v = (not_empty([x[0], x[2]]) for x in (call.k, call.v))
        described_k, described_v = ([described([x], keys) for x in tensors] for tensors in (of_k, of_v))
        store = dense_rows(call.k[1]), dense_rows(call.v[1])
        biases = None if call.biases is None else (call.biases.float() * LOG2E).contiguous()
        return cls(
            (*described_k[0], *described_v[0], *described_k[1], *described_v[1], *store, biases),
            tuple(stride for x in store for stride in x.stride()[:3]),
            biases,
            (0, 0) if biases is None else row_strides(biases),
        )


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a `Call`."""
    call = Call(*arguments)
    q, (out, lse) = whole_rows(call.q), results(call.q, call.v)
    (B, H, L, D), (K, choosers) = q.shape, call.heads
    check_programs(B * K)
    R = H // K
    tiles = _tiles("fwd", q.dtype, q.is_cuda, max(D, out.shape[3]), R)
    shared, Q = _Shared.of(call, tiles.keys), tiles.rows // R
    with on_device_of(q):
        for first, stop, of_tiles in call.blocks(Q):
            _FORWARD(
                (cdiv(stop - first, Q), B * K, 1),
                (q, *shared.sources, *of_tiles.tensors, call.starts, out, lse),
                (
                    q.stride()[:3], shared.s_store, shared.s_bias, call.level * LOG2E, K, choosers, L, first, stop,
                    *of_tiles.numbers, *call.rule, call.scale * LOG2E,
                ),
                (R, call.group_size, *call.constants(call.pool, call.kind, *call.numerics), tiles.rows, tiles.keys),
                tiles.options,
            )  # fmt: skip
    return out, lse


def _backward(d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, call: Call) -> list[Tensor]:
    """Gradients of q, of the sources' keys, of their values, and of the entries' biases, if they have any."""
    d_out, q = whole_rows(d_out), whole_rows(call.q)
    (B, H, L, D), (K, choosers), Dv = q.shape, call.heads, out.shape[3]
    R, g = H // K, call.group_size
    tiles = _tiles("dq", q.dtype, q.is_cuda, max(D, Dv), R)
    shared, Q = _Shared.of(call, tiles.keys), tiles.rows // R
    row_lse, delta = torch.empty_like(lse), torch.empty_like(lse)
    dq, *grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, *call.k, *call.v))
    s_q, s_out, scales = q.stride()[:3], d_out.stride()[:3], (call.scale * LOG2E, call.scale)
    of_tiles = call.opened(Q, 0, L)
    with on_device_of(q):
        _DQ(
            (cdiv(L, Q), B * K, 1),
            (
                q, *shared.sources, *of_tiles.tensors, call.starts, out, d_out, lse, d_lse.contiguous(), row_lse, delta,
                dq,
            ),
            (
                s_q, s_out, shared.s_store, shared.s_bias, call.level * LOG2E, K, choosers, L, 0, L,
                *of_tiles.numbers, *call.rule, *scales,
            ),
            (R, g, *call.constants(call.pool, call.kind, *call.numerics), tiles.rows, tiles.keys),
            tiles.options,
        )  # fmt: skip
        queries, rows = (row_lse, delta, q, d_out), tiles.rows
        tiles = _tiles("dkv", q.dtype, q.is_cuda, max(D, Dv), R)
        d_biases = None if call.biases is None else grads[0].new_zeros(grads[0].shape[:3], dtype=torch.float32)
        for n, level in ((0, call.level), (2, 0.0)):
            if n == 0 and not call.pool:
                grads[0].zero_(), grads[3].zero_()
                continue
            of_entries = (shared.biases, d_biases) if n == 0 else (None, None)
            keys = dense_rows(call.k[n]), dense_rows(call.v[n])
            _DKV(
                (cdiv(keys[0].shape[2], tiles.keys), B * K, 1),
                (*queries, *keys, of_entries[0], of_tiles.words, call.starts, grads[n], grads[3 + n], of_entries[1]),
                (
                    s_q, s_out, tuple(s for x in keys for s in x.stride()[:3]), shared.s_bias, level * LOG2E, K,
                    choosers, L, keys[0].shape[2], of_tiles.words.shape[2], of_tiles.words.shape[1], *call.rule,
                    *scales,
                ),
                (R, *call.constants(n == 0, call.kind, *call.numerics), rows, tiles.rows, tiles.keys),
                tiles.options,
            )  # fmt: skip
        tiles = _tiles("store", q.dtype, q.is_cuda, max(D, Dv), R)
        _store_gradients(call, queries, tiles, grads[1], grads[4])
    if call.biases is not None and d_biases is not None:
        grads.append(d_biases.sum_to_size(call.biases.shape).to(call.biases.dtype))
    return [dq, *grads]


def _store_gradients(
    call: Call, queries: tuple[Tensor, Tensor, Tensor, Tensor], tiles: Tiles, dk: Tensor, dv: Tensor
) -> None:
    """Writes the gradients of the store's keys and values; queries: numbers per row, q and the output's gradient."""
    (B, _, L, r), (K, choosers), G, g = call.groups.shape, call.heads, call.k[0].shape[2], call.group_size
    by_group, order = call.groups.flatten(2).sort(dim=-1, stable=True)
    bounds = torch.arange(G + 1, device=dk.device, dtype=torch.int32).expand(B, choosers, G + 1).contiguous()
    first = torch.searchsorted(by_group, bounds)
    store = dense_rows(call.k[1]), dense_rows(call.v[1])
    BN = min(64, max(16, power_of_2(g)))
    _DSTORE(
        (B * K, G, cdiv(g, BN)),
        (*queries, *store, first, order, dk, dv),
        (
            queries[2].stride()[:3], queries[3].stride()[:3], tuple(s for x in store for s in x.stride()[:3]),
            K, choosers, L, G, r, call.scale * LOG2E, call.scale,
        ),
        (queries[2].shape[1] // K, g, *call.constants(*call.numerics), tiles.rows, BN),
        tiles.options,
    )  # fmt: skip


def operation(name: str, forward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """``forward`` of a `Call` as a torch operation, so that torch.compile keeps it whole; gradients by `_backward`."""

    @torch.library.custom_op(f"condense::{name}", mutates_args=())
    def op(
        q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], biases: Tensor | None, groups: Tensor,
        starts: Tensor | None, rule: Sequence[int], closed: int, level: float, pool: bool, scale: float, softcap: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return forward(q, k, v, biases, groups, starts, tuple(rule), closed, level, pool, scale, softcap)

    op.register_fake(lambda q, k, v, *_: results(q, v))
    op.register_autograd(_differentiate, setup_context=_keep)
    return op


@torch.library.custom_op("condense::attend_recall_backward", mutates_args=())
def _attend_backward(
    d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor],
    biases: Tensor | None, groups: Tensor, starts: Tensor | None, rule: Sequence[int], closed: int, level: float,
    pool: bool, scale: float, softcap: float,
) -> list[Tensor]:  # fmt: skip
    """See `_backward`."""
    call = Call(q, k, v, biases, groups, starts, tuple(rule), closed, level, pool, scale, softcap)
    return _backward(d_out, d_lse, out, lse, call)


@_attend_backward.register_fake
def _(
    d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor],
    biases: Tensor | None, *_: Any,
) -> list[Tensor]:  # fmt: skip
    others = [] if biases is None else [biases]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, *k, *v, *others)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = Call(*inputs)
    ctx.numbers = call[6:]
    ctx.save_for_backward(*output, call.q, *call.k, *call.v, *call[3:6])


def _differentiate(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
    out, lse, q, *tensors, biases, groups, starts = ctx.saved_tensors
    k, v = tensors[:3], tensors[3:]
    dq, *grads = _attend_backward(d_out, d_lse, out, lse, q, k, v, biases, groups, starts, *ctx.numbers)
    return dq, grads[:3], grads[3:6], None if biases is None else grads[6], *[None] * 8


class Kernels(NamedTuple):
    """The functions of a backend: index scores, the choice by them as an operation, attention of a `Call`, the same as
    an operation with gradients, and attention over two sources as `condense.ops.attend`.
    """

    score: Callable[[Scoring], None]
    choice: Callable[..., Tensor]
    forward: Callable[..., tuple[Tensor, Tensor]]
    operation: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., tuple[Tensor, Tensor | None]]


_KERNELS = Kernels(score, choice_operation("choose_recall"), _forward, operation("attend_recall", _forward), attend)


def attend_recall(
    q: Tensor,
    sources: RecallSources,
    choice: Choice,
    *,
    scale: float,
    softcap: float,
    pool: bool,
    return_lse: bool,
    kernels: Kernels = _KERNELS,
) -> tuple[Tensor, Tensor | None]:
    """See `condense.ops.recall.attend_recall`; ``pool``: entries of groups that are not open are seen.

    Where no group is open, or every one, this is attention over two sources, entries or store, and the window.
    """
    entries, store, window, spans = sources
    L, G = q.shape[2], entries.k.shape[2]
    assert isinstance(spans, RuleSpans), "the backend's limits"
    rule = spans.rule
    assert isinstance(rule, UniformRule), "the backend's limits"
    closed = min(spans.hulls([(0, L)])[0][0].hi, G)
    # of a share of the groups all are open at `closed` only where all are for every query, which sees fewer
    r = choice.most(closed)
    if r == 0 or (r == closed and isinstance(choice, IndexChoice)):
        if r == 0:
            rule = rule if pool else replace(rule, max_chunks=0)
        else:
            entries, rule = store, replace(rule, entries=sources.group_size)
        return kernels.attend(
            q, [entries, window], replace(spans, rule=rule), scale=scale, softcap=softcap, dropout_p=0.0,
            return_lse=return_lse,
        )  # fmt: skip
    starts, numbers = describe(spans, 2, L, q.device)
    positions = Positions(starts, tuple(numbers))
    if isinstance(choice, IndexChoice):
        index = (choice.q, choice.index, choice.settings, positions)
        ranked: dict[str, Any] = {"scale": choice.scale, "quota": choice.quota, "closed": closed}
        if needs_operation(choice.q):
            groups = kernels.choice(*choice_arguments(*index, **ranked))
        else:
            groups = choose(*index, **ranked, score=kernels.score)
    else:
        chosen = choice.at(0, L, spans.at(0, L, q.device)[0].hi, G)
        groups = chosen_groups(chosen, r).to(torch.int32)
    biases, level = (entries.bias, 0.0) if isinstance(entries.bias, Tensor) else (None, float(entries.bias or 0.0))
    call = Call(
        q, [entries.k, store.k, window.k], [entries.v, store.v, window.v], biases, groups, starts, tuple(numbers),
        closed, level, pool, scale, softcap,
    )  # fmt: skip
    others = (*call.k, *call.v) if biases is None else (*call.k, *call.v, biases)
    out, lse = (kernels.operation if needs_operation(q, *others) else kernels.forward)(*call)
    return out, lse if return_lse else None
