"""Tokens of right-aligned rows: append, keep the newest; and queries averaged over heads.

All functions are differentiable. If all rows agree (`condense.ops.tensors.per_row`), slices replace gathers.

Shapes: B rows, K KV heads, N columns, M entries, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.ops.tensors.per_row import PerRow, broadcast_rows, int_if_equal, max_row


def head_mean(q: Tensor, num_kv_heads: int) -> Tensor:
    """Mean over the query heads of each KV head, ``[B, K, L, D]`` in the dtype of q ``[B, H, L, D]``.

    Heads are added one after another, so a token's mean is the same to the bit for any number of tokens.
    """
    if q.shape[1] == num_kv_heads:
        return q
    wide = torch.promote_types(q.dtype, torch.float32)
    first, *others = q.unflatten(1, (num_kv_heads, -1)).unbind(2)
    total = first.to(wide)
    for head in others:
        total = total + head
    return (total / (1 + len(others))).to(q.dtype)


def append_window(old: Tensor, new: Tensor, pads: PerRow) -> Tensor:
    """Join old columns and new ones without their first ``pads``, right-aligned per row, to ``[B, K, N, D]``."""
    if old.shape[2] == 0:
        return new
    joined = torch.cat([old, new], dim=2)
    if not isinstance(pads, Tensor) and pads == 0:
        return joined
    # the padding of the new columns stands in the middle of `joined`: shift the old columns right, over it
    column, pads = torch.arange(joined.shape[2], device="cpu")[None], broadcast_rows(pads, 2)
    source = torch.where(column >= old.shape[2] + pads, column, (column - pads).clamp(min=0))
    return joined.gather(2, source.to(new.device, non_blocking=True)[:, None, :, None].expand_as(joined))


def append_entries(old: Tensor, new: Tensor, start: PerRow, stop: PerRow) -> Tensor:
    """Write new entries ``[B, K, n, D]`` to ``[start, stop)`` of each row; columns past a row's stop are never seen."""
    start = int_if_equal(start)
    if not isinstance(start, Tensor):
        return new if start == 0 else torch.cat([old[:, :, :start], new], dim=2)
    wide = F.pad(old, (0, 0, 0, max_row(start) + new.shape[2] - old.shape[2]))
    column = start[:, None] + torch.arange(new.shape[2], device="cpu")
    index = column.to(new.device, non_blocking=True)[:, None, :, None]
    return wide.scatter(2, index.expand_as(new), new)[:, :, : max_row(stop)]


def newest(x: Tensor, count: int) -> Tensor:
    """The last ``count`` columns."""
    return x[:, :, x.shape[2] - count :]


def detach_compact(x: Tensor) -> Tensor:
    """Detach; copy if x is a view of a larger storage, which the view would keep alive."""
    if torch.compiler.is_compiling():
        return x.detach().clone()  # while compiling, storages have no sizes
    x = x.detach()
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()
