"""The `triton` backend: attention over a list of sources as kernels, forward and backward, deterministic.

Shapes: B rows of the batch, H query heads, K KV heads, R = H / K, L queries, N entries of a source, D and Dv widths.
"""

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condense.ops.triton.attend_backward import attend_dkv_kernel, attend_dq_kernel, store_dkv_kernel
from condense.ops.triton.attend_call import AttendCall, AttendShared, Attention, backward_operation, results, strides_of
from condense.ops.triton.attend_forward import OpenForm, attend_fwd_kernel
from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import LOG2E, cdiv, holders, on_device_of, power_of_2, whole_rows
from condense.ops.triton.launch import Launcher, described
from condense.ops.triton.limits import MAX_SOURCES
from condense.ops.triton.recall_choice import OpenedGroups, opened

_FORWARD, _DQ = Launcher(attend_fwd_kernel), Launcher(attend_dq_kernel)
_DKV, _STORE_DKV = Launcher(attend_dkv_kernel), Launcher(store_dkv_kernel)


class Tiles(NamedTuple):
    """Rows and keys of a tile, and Triton's options."""

    rows: int
    keys: int
    options: dict[str, int]


@functools.cache
def tiles_of(kernel: str, dtype: torch.dtype, is_cuda: bool, widest: int, R: int, opens: bool) -> Tiles:
    """Tiles by kernel, dtype, width, heads per KV head, and whether queries open groups; the same for all lengths.

    Measured on an H200 at width 128. Forward: of 64 and 128 rows and 32, 64 and 128 keys, 64 x 64 is the fastest by
    5 to 30 percent: two programs share a multiprocessor, and one multiplies while the other computes its softmax. The
    kernel of dk and dv holds two accumulators in registers, which leaves room for 32 queries at a time.

    Where queries open groups, a tile of "fwd" or "dq" holds the queries whose bits share a word. For keys 192 and
    values 128 wide (expanded latents), 32 keys per tile take 80 ms and 64 take 144 (128K tokens, 16 heads, H200).
    """
    rows, narrow = power_of_2(R), widest <= 128
    if not is_cuda:  # the interpreter
        return Tiles(16 if kernel == "dkv" else max(16, rows), 16, {})
    if dtype == torch.float32:  # each product takes six products of bfloat16
        return Tiles(32 if kernel == "dkv" else max(32, rows), 32, {"num_warps": 4, "num_stages": 1})
    if kernel == "dkv":
        return Tiles(32, 64, {"num_warps": 4 if narrow else 8, "num_stages": 3 if narrow else 2})
    if kernel == "store":
        return Tiles(64, 64, {"num_warps": 4, "num_stages": 2 if narrow else 1})
    if not opens:
        stages = 3 if kernel == "fwd" and narrow else 2
        return Tiles(max(64, rows), 64, {"num_warps": 4 if rows <= 64 else 8, "num_stages": stages})
    if kernel == "fwd" and narrow and R > 1:  # a word has at most 64 bits, one per query
        return Tiles(128, 32, {"num_warps": 4, "num_stages": 2})
    if kernel == "fwd" and R == 1 and widest <= 192 and not narrow:
        return Tiles(64, 32, {"num_warps": 4, "num_stages": 2})
    return Tiles(64, 64, {"num_warps": 4 if narrow else 8, "num_stages": 2})


class _Launches(AttendShared):
    """Arguments that the kernels of a call share, and their launches."""

    def __init__(self, call: AttendCall) -> None:
        super().__init__(call)
        self.store = None if call.groups is None else (self.k[0], self.v[0])
        self.choosers = None if call.groups is None else call.groups.shape[1]

    def tiles(self, kernel: str) -> Tiles:
        """The tiles of a kernel."""
        q, v, opens = self.q, self.v[0], self.store is not None
        return tiles_of(kernel, q.dtype, q.is_cuda, max(q.shape[3], v.shape[3]), self.R, opens)

    def constants(self, *more: Any, sources: bool = True) -> tuple[Any, ...]:
        """Constants of a kernel: number of sources, widths, kind of spans, precision, soft cap, and then ``more``.

        sources: False for a kernel that takes neither the number of sources nor the kind of spans.
        """
        call = self.call
        # float32 products as six of bfloat16 ("bf16x6", not in the interpreter) are as exact as PyTorch's float32
        # attention; as three of tf32 they have more than twice its error
        exact = "bf16x6" if self.q.is_cuda else "ieee"
        numerics = exact if self.q.dtype == torch.float32 else "tf32", call.softcap * LOG2E
        widths = *split_width(self.q.shape[3]), *split_width(self.v[0].shape[3])
        return (len(call.k), *widths, call.kind, *numerics, *more) if sources else (*widths, *numerics, *more)

    def by_rows(
        self, kernel: Launcher, tiles: Tiles, block: tuple[int, int, OpenedGroups | None],
        results: tuple[Tensor, ...], strides: tuple[Any, ...] = (), scales: tuple[float, ...] = (),
    ) -> None:  # fmt: skip
        """Start a kernel that owns tiles of rows, forward or dq. results: its tensors after the spans. strides: of
        results, after q's. scales: its numbers after the softmax scale.
        """
        call, (first, stop, lists) = self.call, block
        (B, _, L, _), K, R = self.q.shape, self.K, self.R
        sources: list[list[Tensor | None]] = [[*self.k], [*self.v]]
        if lists is None or self.store is None:
            of_lists: tuple[Any, ...] = (L, None, None, None)
            s_store, heads, form = None, R, None
        else:
            of_lists = (L, first, stop, lists.groups.shape[2])
            s_store, heads, form = _strides(*self.store), None, OpenForm(R, call.group_size)
            sources = [[None, *x[1:]] for x in sources]
        described_k, described_v = (described(x, tiles.keys, MAX_SOURCES) for x in sources)
        kernel(
            (cdiv(stop - first, tiles.rows // R), B * K, 1),
            (
                self.q, *described_k, *described_v, self.store, self.biases, None if lists is None else tuple(lists),
                self.spans, *results,
            ),
            (
                self.q.stride()[:3], *strides, s_store, self.s_bias, self.s_spans, self.levels, K, heads,
                self.choosers, *of_lists, *call.rule, call.scale * LOG2E, *scales,
            ),
            self.constants(form, tiles.rows, tiles.keys), tiles.options,
        )  # fmt: skip


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of batch, head and row of each tensor."""
    return tuple([stride for x in tensors for stride in x.stride()[:3]])


def _forward(call: AttendCall) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, L, Dv]`` and log-sum-exp ``[B, H, L]`` of a call."""
    launches, (out, lse) = _Launches(call), results(call.q, call.v)
    tiles = launches.tiles("fwd")
    with on_device_of(call.q):
        for block in call.blocks(tiles.rows // launches.R):
            launches.by_rows(_FORWARD, tiles, block, (out, lse))
            del block  # before the next one is made
    return out, lse


def _backward(d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, call: AttendCall) -> list[Tensor]:
    """Gradients of q, of the sources' keys and of their values, and of the biases."""
    launches, d_out = _Launches(call), whole_rows(d_out)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # as `results` made it, also if torch.compile moved it
    row_lse, delta = torch.empty_like(lse), torch.empty_like(lse)
    tensors = launches.q, *launches.k, *launches.v
    dq, *grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
    dk, dv = tuple(grads[: len(call.k)]), tuple(grads[len(call.k) :])
    is_biased = any(x is not None for x in launches.biases)
    d_biases = tuple([x.new_empty(x.shape[:3], dtype=torch.float32) for x in launches.k]) if is_biased else None
    queries = row_lse, delta, launches.q, d_out
    tiles = launches.tiles("dq")
    Q, L = tiles.rows // launches.R, call.q.shape[2]
    lists = None if call.groups is None else opened(call.groups, call.num_groups, call.closed, Q, 0, L)
    with on_device_of(call.q):
        launches.by_rows(
            _DQ, tiles, (0, L, lists), (out, d_out, lse, d_lse.contiguous(), row_lse, delta, dq),
            (d_out.stride()[:3],), (call.scale,),
        )  # fmt: skip
        _source_gradients(launches, queries, dk, dv, d_biases)
        if launches.store is not None:
            _store_gradients(launches, queries, dk[0], dv[0])
    of_biases = []
    for n, bias in enumerate(call.biases):
        if d_biases is None:  # only empty sources have biases
            of_biases.append(torch.zeros_like(bias))
        else:
            of_source = d_biases[call.bias_of.index(n)][:, :, : bias.shape[2]]
            of_biases.append(of_source.sum_to_size(bias.shape).to(bias.dtype))
    return [x[:, :, : y.shape[2]] for x, y in zip((dq, *grads), (call.q, *call.k, *call.v), strict=True)] + of_biases


def _source_gradients(
    launches: _Launches, queries: tuple[Tensor, ...], dk: tuple[Tensor, ...], dv: tuple[Tensor, ...],
    d_biases: tuple[Tensor, ...] | None,
) -> None:  # fmt: skip
    """Write the gradients of the keys, values and biases of all sources but the store. queries: lse, delta, q and the
    output's gradient.
    """
    call, k, v = launches.call, launches.k, launches.v
    tiles, K, R = launches.tiles("dkv"), launches.K, launches.R
    # heads in a tile: the largest power of two that divides R
    heads, sizes = min(R & -R, tiles.rows), [x.shape[2] for x in k]
    if launches.store is not None:
        sizes[0] = 0
    seen = holders(call.spans, max(sizes)).unbind() if call.spans is not None and call.kind == "arrays" else None
    grouped = (described([x.unflatten(1, (-1, heads))], tiles.rows // heads) for x in queries[2:])
    tensors = (
        *queries[:2], *itertools.chain(*grouped), tuple(k), tuple(v), launches.biases, launches.spans, seen, dk, dv,
        d_biases,
    )  # fmt: skip
    numbers = (
        tuple([x.stride()[:3] for x in k]), tuple([x.stride()[:3] for x in v]), launches.s_bias, launches.s_spans,
        None if seen is None else tuple([(x.stride(0), *strides_of(x)) for x in seen]), launches.levels, K, R,
        call.q.shape[2], *sizes, *[0] * (MAX_SOURCES - len(sizes)), *call.rule, call.scale * LOG2E, call.scale,
    )  # fmt: skip
    grid = (call.q.shape[0] * K, sum(cdiv(size, tiles.keys) for size in sizes), 1)
    _DKV(grid, tensors, numbers, launches.constants(heads, tiles.rows, tiles.keys), tiles.options)


def _store_gradients(launches: _Launches, queries: tuple[Tensor, ...], dk: Tensor, dv: Tensor) -> None:
    """Write the gradients of the store's keys and values."""
    call, R, tiles, store = launches.call, launches.R, launches.tiles("store"), launches.store
    assert call.groups is not None, "queries open groups"
    assert store is not None, "queries open groups"
    (B, choosers, L, r), G, g = call.groups.shape, call.num_groups, call.group_size
    by_group, order = call.groups.flatten(2).sort(dim=-1, stable=True)
    bounds = torch.arange(G + 1, device=dk.device, dtype=torch.int32).expand(B, choosers, G + 1).contiguous()
    first = torch.searchsorted(by_group, bounds)
    BN = min(64, max(16, power_of_2(g)))
    _STORE_DKV(
        (B * launches.K, G, cdiv(g, BN)),
        (*queries, *store, first, order, dk, dv),
        (
            *(x.stride()[:3] for x in queries[2:]), _strides(*store), launches.K, choosers, L, G, r,
            call.scale * LOG2E, call.scale,
        ),
        (R, g, *launches.constants(tiles.rows, BN, sources=False)), tiles.options,
    )  # fmt: skip


attend_backward = backward_operation(_backward)
ATTENTION = Attention("attend", _forward, attend_backward)
attend = ATTENTION.attend
