"""Gradients of Recall's attention over a prompt.

Shapes as in `condense.ops.triton.recall_attend`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.triton.attend import Tiles
from condense.ops.triton.host import LOG2E, cdiv, dense_rows, on_device_of, power_of_2, whole_rows
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_attend_call import RecallCall, RecallShared, tiles_of
from condense.ops.triton.recall_attend_kernels import recall_dq_kernel
from condense.ops.triton.recall_backward_kernels import recall_dkv_kernel, recall_store_kernel

_DQ, _DKV, _DSTORE = (Launcher(x) for x in (recall_dq_kernel, recall_dkv_kernel, recall_store_kernel))


def backward(d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, call: RecallCall) -> list[Tensor]:
    """Gradients of q, of the sources' keys, of their values, and of the entries' biases, if they have any."""
    d_out, q = whole_rows(d_out), whole_rows(call.q)
    (B, H, L, D), (K, choosers), Dv = q.shape, call.heads, out.shape[3]
    R, g = H // K, call.group_size
    tiles = tiles_of("dq", q.dtype, q.is_cuda, max(D, Dv), R)
    shared, Q = RecallShared.of(call, tiles.keys), tiles.rows // R
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
        tiles = tiles_of("dkv", q.dtype, q.is_cuda, max(D, Dv), R)
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
        tiles = tiles_of("store", q.dtype, q.is_cuda, max(D, Dv), R)
        _store_gradients(call, queries, tiles, grads[1], grads[4])
    if call.biases is not None and d_biases is not None:
        grads.append(d_biases.sum_to_size(call.biases.shape).to(call.biases.dtype))
    return [dq, *grads]


def _store_gradients(
    call: RecallCall, queries: tuple[Tensor, Tensor, Tensor, Tensor], tiles: Tiles, dk: Tensor, dv: Tensor
) -> None:
    """Write the gradients of the store's keys and values. queries: lse, delta, q and the output's gradient."""
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
