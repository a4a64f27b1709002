"""Recall's store of exact tokens: on the device of the other buffers, or in host memory.

Beside tensors on a CUDA device, host memory is pinned: kernels read and write it in place. The tokens of a prompt are
copied to it on a stream for writing, while attention of the same layer runs; `join_writes` makes later work wait for
that. A later piece of a prompt needs the stored tokens on the device: they are copied there on a stream for fetching,
while the layer before runs. Beside tensors on the CPU, host memory is ordinary memory.

Shapes: B rows, K KV heads, N tokens, D and Dv widths of keys and values; a stored token has a width of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.methods import Recall
from condense.ops import StepSettings, StepState
from condense.ops.step.state import pinned_zeros
from condense.ops.triton.limits import step_obstacle


def check_store(settings: StepSettings, k: Tensor, v: Tensor, latent: int, groups: int = 0) -> None:
    """Raise ValueError where steps cannot read a store in host memory.

    k ``[B, K, L, D]``, v ``[B, K, L, Dv]``; latent: as in `condense.ops.StepCall`. groups: the most that the cache will
    hold, 0 if that is not known; then the step alone checks a number of open groups that grows with them.
    """
    if settings.choice is None or not (settings.choice.store.on_host and k.is_cuda):
        return
    obstacle = step_obstacle(k.device, k.dtype, (k.shape[3], v.shape[3]), settings, latent=latent, entries=groups)
    if obstacle is not None:
        raise ValueError(f"store='host' needs the Triton step, which {obstacle}; use store='device'")


def refuse_reorder(method: Recall) -> None:
    """Raise ValueError if rows would move in host memory at every step."""
    if method.store == "host":
        raise ValueError(
            "beams move the rows of a cache at every step, too much for store='host': use store='device', or decode "
            "greedily or by sampling"
        )


def longer_store(store: Tensor, tokens: int, device: torch.device) -> Tensor:
    """A longer copy of a store, with zeros from its end up to column ``tokens``; device: that of the other buffers."""
    if store.device == device:
        return F.pad(store, (0, 0, 0, tokens - store.shape[2]))
    finish_writes(device)
    longer = pinned_zeros((*store.shape[:2], tokens, store.shape[3]), store.dtype)
    longer[:, :, : store.shape[2]].copy_(store)
    return longer


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


def with_pinned_store(buffers: StepState) -> StepState:
    """The buffers with their store in pinned memory, if it is in host memory: copies of tensors are not pinned."""
    if not buffers.is_apart or buffers.store.is_pinned():
        return buffers
    return buffers._replace(store=buffers.store.pin_memory())


class PinnedCopies:
    """Mixin for classes with `StepState` ``buffers``: copies and unpickled objects have a pinned store too."""

    buffers: Any

    def __getstate__(self) -> dict[str, Any]:
        if self.buffers is not None and self.buffers.is_apart:
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
