"""Recall's store of exact tokens: on the device of the other buffers, or in host memory.

Beside tensors on a CUDA device, host memory is pinned: kernels read and write it in place. The tokens of a prompt are
copied to it on a stream for writing, while attention of the same layer runs; `join_writes` makes later work wait for
that. A later piece of a prompt needs the stored tokens on the device: they are copied there on a stream for fetching,
while the layer before runs. Beside tensors on the CPU, host memory is ordinary memory.

Shapes: B rows, K KV heads, N tokens, D and Dv widths of keys and values; a stored token has a width of its own.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.methods import Recall
from condense.ops.recall import RecallState
from condense.ops.recall.limits import groups_obstacle, pairs_obstacle, store_obstacle


def check_store(method: Recall, k: Tensor, v: Tensor, latent: int, groups: int | None = None) -> None:
    """Raise ValueError where steps cannot read a store in host memory.

    k ``[B, K, L, D]``, v ``[B, K, L, Dv]``; latent: as in `condense.ops.recall.recall_step`. groups: the most that the
    cache will hold, None if that is not known; then a ``num_recall`` that is a share is checked by the step alone.
    """
    if method.store == "host" and k.is_cuda:
        obstacle = store_obstacle(k, v, method.step_settings, latent=latent)
        if obstacle is not None:
            raise ValueError(f"store='host' needs the Triton step, which {obstacle}; use store='device'")
        obstacle = groups_obstacle(groups or 0)
        if obstacle is not None:
            raise ValueError(
                f"store='host' needs the Triton step, which {obstacle}: use a larger group_size, a shorter cache or "
                "store='device'"
            )
        opened = method.quota.at(groups) if groups is not None else method.num_recall
        obstacle = pairs_obstacle(opened, method.slots) if isinstance(opened, int) else None
        if obstacle is not None:
            raise ValueError(f"store='host' needs the Triton step, which {obstacle}; use fewer slots")


def refuse_reorder(method: Recall) -> None:
    """Raise ValueError if rows would move in host memory at every step."""
    if method.store == "host":
        raise ValueError(
            "beams move the rows of a cache at every step, too much for store='host': use store='device', or decode "
            "greedily or by sampling"
        )


def new_store(k: Tensor, tokens: int, width: int, dtype: torch.dtype, *, on_host: bool) -> Tensor:
    """Zeros ``[B, K, tokens, width]`` in ``dtype`` for k ``[B, K, L, D]``, on its device or in host memory.

    Raises RuntimeError where the host cannot pin so much memory.
    """
    shape = (*k.shape[:2], tokens, width)
    return _pinned_zeros(shape, dtype) if on_host and k.is_cuda else k.new_zeros(shape, dtype=dtype)


def longer_store(store: Tensor, tokens: int, device: torch.device) -> Tensor:
    """A longer copy of a store, with zeros from its end up to column ``tokens``; device: that of the other buffers."""
    if store.device == device:
        return F.pad(store, (0, 0, 0, tokens - store.shape[2]))
    finish_writes(device)
    longer = _pinned_zeros((*store.shape[:2], tokens, store.shape[3]), store.dtype)
    longer[:, :, : store.shape[2]].copy_(store)
    return longer


def _pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    try:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"store='host' wants {math.prod(shape) * dtype.itemsize:,} bytes of pinned host memory for a layer of "
            f"{shape[2]:,} tokens, which the host does not give: use store='device', a shorter cache or fewer rows"
        ) from error


def write_tokens(store: Tensor, start: int, tokens: Tensor) -> None:
    """Write ``tokens`` ``[B, K, n, width]`` to columns ``[start, start + n)`` of a store.

    A store in host memory is written while other work goes on; `join_writes` or `finish_writes` wait for it.
    """
    n = tokens.shape[2]
    if store.device == tokens.device:
        store[:, :, start : start + n].copy_(tokens)
        return
    stream = _write_stream(tokens.device)
    stream.wait_stream(torch.cuda.current_stream(tokens.device))
    with torch.cuda.stream(stream):
        # one copy per row and KV head, because only their columns lie side by side in the store
        for there, here in zip(store.flatten(0, 1), tokens.flatten(0, 1), strict=True):
            there[start : start + n].copy_(here, non_blocking=True)
    tokens.record_stream(stream)


def fetch_tokens(store: Tensor, count: int, device: torch.device) -> Tensor | None:
    """Begin to copy the first ``count`` columns of a store in host memory to ``device``, while other work runs there.

    Pass the result to `read_tokens`, which waits for the copy. None if the store is on ``device``, or count is 0.
    """
    if store.device == device or count == 0:
        return None
    tokens = torch.empty(*store.shape[:2], count, store.shape[3], dtype=store.dtype, device=device)
    stream = _fetch_stream(device)
    # wait for kernels that may still use the new tensor's memory, and for columns of the store still being written
    stream.wait_stream(torch.cuda.current_stream(device))
    stream.wait_stream(_write_stream(device))
    with torch.cuda.stream(stream):
        for there, here in zip(store.flatten(0, 1), tokens.flatten(0, 1), strict=True):
            here.copy_(there[:count], non_blocking=True)
    tokens.record_stream(stream)
    return tokens


def read_tokens(store: Tensor, count: int, device: torch.device, fetched: Tensor | None = None) -> Tensor:
    """The first ``count`` columns of a store on ``device``: a view of a store there, else a copy, for one call only.

    fetched: what `fetch_tokens` began to copy of this store, with no fewer columns; None: copy them now.
    """
    if fetched is None:
        fetched = fetch_tokens(store, count, device)
    if fetched is None:
        return store[:, :, :count].to(device)
    torch.cuda.current_stream(device).wait_stream(_fetch_stream(device))
    return fetched[:, :, :count]


def join_writes(device: torch.device) -> None:
    """Make what is given to the device's current stream from now on wait for all that `write_tokens` has begun."""
    torch.cuda.current_stream(device).wait_stream(_write_stream(device))


def finish_writes(device: torch.device) -> None:
    """Wait on the host until stores in its memory hold all tokens that copies and kernels were to write so far."""
    join_writes(device)
    torch.cuda.current_stream(device).synchronize()


def is_in_host_memory(buffers: RecallState) -> bool:
    """True if the store lies in host memory and the other buffers do not."""
    return buffers.store.device != buffers.seen.device


def with_pinned_store(buffers: RecallState) -> RecallState:
    """The buffers with their store in pinned memory, if it is in host memory: copies of tensors are not pinned."""
    if not is_in_host_memory(buffers) or buffers.store.is_pinned():
        return buffers
    return buffers._replace(store=buffers.store.pin_memory())


class PinnedCopies:
    """Mixin for classes with `RecallState` ``buffers``: copies and unpickled objects have a pinned store too."""

    buffers: Any

    def __getstate__(self) -> dict[str, Any]:
        if self.buffers is not None and is_in_host_memory(self.buffers):
            finish_writes(self.buffers.seen.device)
        state = super().__getstate__()
        assert isinstance(state, dict)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.buffers is not None:
            self.buffers = with_pinned_store(self.buffers)


@functools.cache
def _write_stream(device: torch.device) -> torch.cuda.Stream:
    """On which tokens are copied from the device to stores in host memory."""
    return torch.cuda.Stream(device)


@functools.cache
def _fetch_stream(device: torch.device) -> torch.cuda.Stream:
    """On which stored tokens are copied from host memory to the device."""
    return torch.cuda.Stream(device)
