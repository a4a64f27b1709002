"""A condensed cache layer of fixed size at fixed addresses, for compiled decode and CUDA graphs.

What it can hold is known from the start: entries for ``max_cache_len`` tokens and a ring for the exact ones. One new
token is a `condense.ops.decode_step`; several are read as by the growing cache and written back in place.
Shapes as in `condense.functional` and `condense.ops.step`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from condense.functional import Past, Sources, extend, num_entries, step_plan
from condense.methods import Method, on_latents
from condense.ops import StepState, decode_step, resolve_step_backend
from condense.ops.aligned import per_entry
from condense.ops.rows import PerRow, agreed, least, most, spread


class StaticCondensedLayer(CacheLayerMixin):
    """One attention layer's condensed past for up to ``max_cache_len`` slots, padding included.

    Memory is taken by the first tokens, whose rows, heads, widths, dtype and device it keeps from then on.
    A batch of another size, or more tokens than fit, raise ValueError and change nothing.
    ``num_slots`` int64 ``[]`` on that device counts the slots seen: replays of a CUDA graph count themselves.
    """

    is_compileable = True
    is_croppable = False
    is_sliding = False

    def __init__(self, method: Method, max_cache_len: int) -> None:
        self.method = method
        self.max_cache_len = max_cache_len
        self.plan = step_plan(method)
        self.state: StepState | None = None
        self.num_slots = torch.zeros((), dtype=torch.int64)
        super().__init__()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor, latent_width: int | None = None) -> None:
        """Take the memory for rows, heads, widths, dtype and device of key_states ``[B, K, L, D]`` and value_states.

        latent_width: as in `condense.methods.on_latents`, None for ordinary keys.
        """
        (B, K, _, D), Dv = key_states.shape, value_states.shape[3]
        rule, N = self.method.rule, self.max_cache_len
        W = N if rule.window is None else min(N, rule.window + rule.chunk)
        M = most(num_entries(self.method, N))
        sizes = ((M, D), (M, Dv), (W, D), (W, Dv), (self.plan.num_summary, D))
        device = key_states.device
        buffers = [torch.zeros(B, K, *size, dtype=key_states.dtype, device=device) for size in sizes]
        self.state = StepState._make([*buffers, torch.zeros(B, dtype=torch.int64, device=device)])
        self.num_slots = self.num_slots.to(device)
        self.batch_size, self.dtype, self.device = B, key_states.dtype, device
        self.latent_width = latent_width or 0
        self.view = on_latents(self.method, latent_width) if latent_width else self.method
        self.backend = resolve_step_backend("auto", device, self.dtype, (D, Dv), self.plan, latent=self.latent_width)
        # entries of such methods differ in their bias, which a plan cannot say
        bias = self.method.prefix_bias(M, device) if self.method.pooling is None else None
        self.prefix_bias = per_entry(bias, M, device)
        if not torch.compiler.is_compiling():
            for tensor in (*self.state, self.num_slots):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        real: Tensor | None = None,
        latent_width: int | None = None,
    ) -> Tensor:
        """Read one token per row and return its attention ``[B, H, 1, Dv]``: no gradients, one graph, no waiting.

        q ``[B, H, 1, D]``, k ``[B, K, 1, D]``, v ``[B, K, 1, Dv]``; real bool ``[B]``: rows whose token counts.
        latent_width: k are latents, absorbed queries come in, and values are the first so many columns of k: v has
        width 0, and so many columns come out.
        Raises ValueError, state unchanged, for other rows or another dtype and for a full cache. While being compiled
        or captured it cannot look how full it is; then a step too many stays inside the buffers.
        """
        state = self._for(k, v, latent_width)
        out = decode_step(
            q,
            k,
            v,
            state,
            self.plan,
            scale=scale,
            real=real,
            represent=self.view.represent,
            prefix_bias=self.prefix_bias,
            latent=self.latent_width,
            backend=self.backend,
        )
        self.num_slots.add_(1)
        return out

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Sources, None]:
        """Read new tokens and return what their queries attend to; arguments as `CondensedLayer.update`.

        Waits for the device. Raises ValueError, state unchanged, for other rows or another dtype, for more tokens
        than there is room for, and if called by anything but a condensed model.
        """
        if "query_states" not in kwargs:
            raise ValueError(
                "this cache holds condensed layers, which only a condensed model can fill: call condense.apply(model, "
                "...) on the model, or give the stock model a new cache"
            )
        state = self._for(key_states, value_states, kwargs.get("latent_width"))
        before = agreed(state.seen.cpu())
        sources, past = extend(
            self.view,
            self._past(state, before) if int(self.num_slots) > 0 else None,
            key_states,
            value_states,
            kwargs["query_states"],
            scale=kwargs["scale"],
            counts=kwargs.get("counts"),
        )
        assert past is not None
        self._store(state, before, past)
        self.num_slots.add_(key_states.shape[2])
        return sources, None

    def _for(self, k: Tensor, v: Tensor, latent_width: int | None) -> StepState:
        """The state, if these new tokens fit in."""
        B, L = k.shape[0], k.shape[2]
        if not self.is_initialized:
            if self.max_cache_len < L:
                self._refuse_length(0, L)
            self.lazy_initialization(k, v, latent_width)
        elif self.batch_size != B:
            raise ValueError(
                f"static cache: wanted {self.batch_size} rows, for which it was made, got {B}; make a new cache for "
                "another batch"
            )
        elif k.dtype != self.dtype:
            raise ValueError(
                f"static cache: wanted {self.dtype}, for which it was made, got {k.dtype}; make a new cache, and use "
                "autocast in all calls or in none"
            )
        elif not (torch.compiler.is_compiling() or _is_capturing(self.device)):
            num_slots = int(self.num_slots)
            if num_slots + L > self.max_cache_len:
                self._refuse_length(num_slots, L)
        assert self.state is not None
        return self.state

    def _refuse_length(self, num_slots: int, L: int) -> NoReturn:
        raise ValueError(
            f"static cache: wanted at most {self.max_cache_len} tokens (max_cache_len), got {num_slots} and {L} more; "
            "make it longer, or use a cache that grows (cache_implementation unset)"
        )

    def _past(self, state: StepState, seen: PerRow) -> Past:
        """What the buffers hold, in order, once the rows have ``seen`` tokens."""
        count = most(seen)
        num_prefix = most(num_entries(self.method, seen))
        return Past(
            state.prefix_k[:, :, :num_prefix],
            state.prefix_v[:, :, :num_prefix],
            _newest(state.ring_k, seen, count),
            _newest(state.ring_v, seen, count),
            _newest(state.ring_q, seen, count),
            seen,
            0,
        )

    def _store(self, state: StepState, before: PerRow, past: Past) -> None:
        """Bring the buffers from ``before`` tokens to the past."""
        old, new = (num_entries(self.method, seen) for seen in (before, past.seen))
        first, last = least(old), most(new)
        state.prefix_k[:, :, first:last].copy_(past.prefix_k[:, :, first:last])
        state.prefix_v[:, :, first:last].copy_(past.prefix_v[:, :, first:last])
        for ring, columns in (
            (state.ring_k, past.band_k),
            (state.ring_v, past.band_v),
            (state.ring_q, past.summary_q),
        ):
            n = min(ring.shape[2], columns.shape[2])
            if n > 0:
                # what stands before a row's start goes to slots of its own and is never seen
                slots = _slots(past.seen, n, ring)
                ring.scatter_(2, slots.expand(-1, ring.shape[1], -1, ring.shape[3]), columns[:, :, -n:])
        state.seen.copy_(spread(past.seen, self.batch_size))

    @property
    def keys(self) -> Tensor | None:
        """Exact keys ``[B, K, W, D]``, a ring."""
        return None if self.state is None else self.state.ring_k

    @keys.setter
    def keys(self, value: None) -> None:
        """Transformers' base class initialises the attribute; the state itself is `state`."""

    @property
    def values(self) -> Tensor | None:
        """Exact values ``[B, K, W, Dv]``, a ring."""
        return None if self.state is None else self.state.ring_v

    @values.setter
    def values(self, value: None) -> None:
        """See `keys`."""

    def get_seq_length(self) -> Tensor | int:
        """Slots seen, padding included; once there are any, the counter itself, as transformers' static layers."""
        return self.num_slots if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask has a column for every slot that there will ever be."""
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        """``max_cache_len``."""
        return self.max_cache_len

    get_max_cache_shape = get_max_length  # its name up to transformers 5.17

    def reset(self) -> None:
        """Forget everything, in place."""
        if self.state is not None:
            for tensor in (*self.state, self.num_slots):
                tensor.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of ``beam_idx`` (int ``[B]``), in place."""
        for tensor in self.state or ():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused with ValueError: the ring has no room for tokens that might be taken back."""
        _refuse("cannot take tokens back (assisted decoding, prompt lookup)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused with ValueError, as `batch_select_indices`."""
        _refuse("keeps its number of rows")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refused with ValueError: buffers at fixed addresses cannot change their size."""
        _refuse("keeps its number of rows")

    def offload(self) -> None:
        """Refused with ValueError: the buffers' addresses are fixed."""
        _refuse("stays where it is")


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"a static condensed cache {what}: use a cache that grows (cache_implementation unset)")


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _slots(seen: PerRow, n: int, ring: Tensor) -> Tensor:
    """Ring slots of the newest n positions, ``[B, 1, n, 1]``."""
    slots = (spread(seen, ring.shape[0])[:, None] - n + torch.arange(n)) % ring.shape[2]
    return slots.to(ring.device, non_blocking=True)[:, None, :, None]


def _newest(ring: Tensor, seen: PerRow, limit: int) -> Tensor:
    """The newest columns in order, right-aligned: as many as there are, at most ``limit``."""
    n = min(limit, ring.shape[2])
    if n == 0:
        return ring[:, :, :0]
    return ring.gather(2, _slots(seen, n, ring).expand(-1, ring.shape[1], -1, ring.shape[3]))
