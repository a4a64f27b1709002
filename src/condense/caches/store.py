"""The store of exact tokens of closed groups: on the device of the other buffers, or in host memory.

Beside tensors on a CUDA device, host memory is pinned: kernels read and write it in place. The tokens of a prompt are
copied to it on a stream of their own while the same layer attends. For a later piece of the prompt they are fetched on
another stream while the layer before runs. Beside tensors on the CPU, host memory is ordinary memory.

Shapes: B rows, K KV heads, N tokens, D and Dv widths of keys and values; a stored token has a width of its own.
"""

import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.ops import StepSettings, StepState, step_backend
from condense.ops.step import fields_of
from condense.ops.tensors.pinned import pinned_zeros
from condense.ops.triton.limits import step_obstacle


class Store:
    """The store of one layer's exact tokens of closed groups, with the copies to and from it that are under way.

    A method without a choice among groups has an empty store, whose methods do nothing.
    """

    def __init__(self, settings: StepSettings) -> None:
        self.settings = settings
        choice = settings.choice
        self.on_host = choice is not None and choice.store.on_host
        # tokens that `fetch` has begun to copy for the next `read`
        self._fetched: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy or pickle, without fetched tokens: each fetches its own."""
        return self.__dict__ | {"_fetched": None}

    def check(self, k: Tensor, v: Tensor, latent: int, groups: int = 0) -> None:
        """Raise ValueError where tokens like k ``[B, K, L, D]`` and v ``[B, K, L, Dv]`` cannot be kept or read.

        latent: as in `condense.ops.StepCall`. groups: the most that there will be, 0 if that is not known.
        """
        widths = (k.shape[3], v.shape[3])
        fields_of(self.settings, k.shape[1], widths, k.dtype)  # widths that index and store cannot hold
        if self.on_host and k.is_cuda:
            obstacle = step_obstacle(k.device, k.dtype, widths, self.settings, latent=latent, entries=groups)
            if obstacle is not None:
                raise ValueError(f"store='host' needs the Triton step, which {obstacle}; use store='device'")

    def backend(self, k: Tensor, v: Tensor, latent: int, groups: int = 0) -> str:
        """The backend of steps that read tokens like k and v; latent, groups: as in `check`."""
        return step_backend(k.device, k.dtype, (k.shape[3], v.shape[3]), self.settings, latent=latent, entries=groups)

    def refuse_reorder(self) -> None:
        """Raise ValueError if rows would move in host memory at every step."""
        if self.on_host:
            raise ValueError(
                "beams move the rows of a cache at every step, too much for store='host': use store='device', or "
                "decode greedily or by sampling"
            )

    def longer(self, buffers: StepState, groups: int) -> Tensor:
        """The store among the buffers, or a longer copy with room for at least ``groups`` groups."""
        store, g = buffers.store, self.settings.rule.chunk
        if self.settings.choice is None or groups * g <= store.shape[2]:
            return store
        held = store.shape[2] // g
        if self.on_host:
            groups = max(groups, held + held // 4)
        if not buffers.is_apart:
            return F.pad(store, (0, 0, 0, (groups - held) * g))
        finish_writes(buffers)
        longer = pinned_zeros((*store.shape[:2], groups * g, store.shape[3]), store.dtype, buffers.seen.device)
        longer[:, :, : store.shape[2]].copy_(store)
        return longer

    def more_slots(self, buffers: StepState, groups: int) -> dict[str, Tensor]:
        """The buffers that hold slots, by name, if with room for so many groups there are more of them; else none."""
        choice, S = self.settings.choice, buffers.held.shape[-1]
        added = 0 if choice is None else min(choice.store.slots, groups) - S
        if added <= 0:
            return {}
        order = torch.arange(S, S + added, dtype=torch.int32, device=buffers.order.device)
        return {
            "slots": F.pad(buffers.slots, (0, 0, 0, added * self.settings.rule.chunk)),
            "held": F.pad(buffers.held, (0, added), value=-1),
            # empty slots are taken before any copy is given up
            "order": torch.cat([order.expand(*buffers.order.shape[:2], -1), buffers.order], dim=2),
        }

    def write(self, store: Tensor, start: int, tokens: Tensor) -> None:
        """Write ``tokens`` ``[B, K, n, width]`` to columns ``[start, start + n)`` of a store.

        A store in host memory is written while other work goes on; `join_writes` waits for it.
        """
        self.forget()
        n = tokens.shape[2]
        if store.device == tokens.device:
            store[:, :, start : start + n].copy_(tokens)
            return
        stream = _stream(tokens.device, "write")
        stream.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(stream):
            # one copy per row and KV head, because only their columns lie side by side in the store
            for there, here in zip(store.flatten(0, 1), tokens.flatten(0, 1), strict=True):
                there[start : start + n].copy_(here, non_blocking=True)
        tokens.record_stream(stream)

    def fetch(self, buffers: StepState, groups: int) -> None:
        """Begin to copy the first ``groups`` groups of a store in host memory to the device, while other work runs.

        A store with room for fewer is copied whole. `read` waits for the copy. Nothing is begun if the store is on the
        device, or if a copy was begun before.
        """
        if self._fetched is None:
            tokens = min(groups * self.settings.rule.chunk, buffers.store.shape[2])
            self._fetched = _begin_to_fetch(buffers.store, tokens, buffers.seen.device)

    def read(self, store: Tensor, count: int, device: torch.device) -> Tensor:
        """The first ``count`` columns of a store, on ``device``: a view if it is there, else a copy for this call."""
        fetched, self._fetched = self._fetched, None
        if fetched is None or fetched.shape[2] < count:
            fetched = _begin_to_fetch(store, count, device)
        if fetched is None:
            return store[:, :, :count].to(device)
        torch.cuda.current_stream(device).wait_stream(_stream(device, "fetch"))
        return fetched[:, :, :count]

    def forget(self) -> None:
        """Drop fetched tokens, because rows or tokens of the store have changed since."""
        self._fetched = None


def join_writes(buffers: StepState | None) -> None:
    """Let later work on the device's current stream wait for all copies that `Store.write` has begun."""
    if buffers is not None and buffers.is_apart:
        device = buffers.seen.device
        torch.cuda.current_stream(device).wait_stream(_stream(device, "write"))


def finish_writes(buffers: StepState | None) -> None:
    """Block the host until a store in its memory holds all tokens that copies and kernels were told to write."""
    join_writes(buffers)
    if buffers is not None and buffers.is_apart:
        torch.cuda.current_stream(buffers.seen.device).synchronize()


def with_pinned_store(buffers: StepState) -> StepState:
    """The buffers with their store in pinned memory, if it is in host memory: copies of tensors are not pinned."""
    if not buffers.is_apart or buffers.store.is_pinned():
        return buffers
    store = buffers.store
    return buffers._replace(store=pinned_zeros(tuple(store.shape), store.dtype, buffers.seen.device).copy_(store))


@functools.cache
def _stream(device: torch.device, use: Literal["write", "fetch"]) -> torch.cuda.Stream:
    """A device's stream for copies to stores in host memory, or from them; all layers share it."""
    return torch.cuda.Stream(device)


def _begin_to_fetch(store: Tensor, count: int, device: torch.device) -> Tensor | None:
    """Begin to copy the first ``count`` columns of a store to ``device``, and return the copy; None if it is there."""
    if store.device == device or count == 0:
        return None
    tokens = torch.empty(*store.shape[:2], count, store.shape[3], dtype=store.dtype, device=device)
    stream = _stream(device, "fetch")
    # wait for kernels that may still use the new tensor's memory, and for columns of the store still being written
    stream.wait_stream(torch.cuda.current_stream(device))
    stream.wait_stream(_stream(device, "write"))
    with torch.cuda.stream(stream):
        for there, here in zip(store.flatten(0, 1), tokens.flatten(0, 1), strict=True):
            here.copy_(there[:count], non_blocking=True)
    tokens.record_stream(stream)
    return tokens
