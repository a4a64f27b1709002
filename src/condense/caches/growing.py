"""A growing condensed cache layer under transformers' cache contract.

It reports the tokens it has *seen* as its length, while what it stores is entries, the exact window and
a little slack. Pieces of several tokens are read by `condense.functional.extend`, which makes a new past; where the
Triton step runs, single tokens are taken into buffers in place. Shapes as in `condense.functional`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from condense.caches.refusals import refuse_other_dtype, refuse_stock_tokens
from condense.caches.ring import RingState
from condense.functional import Context, Past, extend, first_needed, num_entries, step_settings
from condense.methods import Method, for_latents
from condense.ops import StepSettings, step_backend
from condense.ops.tensors.per_row import PerRow, int_if_equal, max_row, min_row


class CondensedLayer(CacheLayerMixin):
    """One attention layer's condensed past. All state follows beams, selection, repetition, crop and reset."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method
        # at most one of them: going over costs a copy, and is put off until tokens come that need it
        self._past: Past | None = None
        self._steps: RingState | None = None
        self.device = torch.device("cpu")
        self._num_slots = 0
        # newest slots that hold a real token in every row: what may be cropped without looking at padding
        self._num_real_slots = 0

    @property
    def past(self) -> Past | None:
        """What is kept between calls, None before the first tokens. Made anew while single tokens are read."""
        return self._past if self._steps is None else self._steps.past()

    @past.setter
    def past(self, past: Past | None) -> None:
        self._past, self._steps = past, None

    @cached_property
    def _plan(self) -> StepSettings:
        return step_settings(self.method)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember where the state lives; tensors are made by the first `update`."""
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Context, None]:
        """Read new tokens and return what their queries attend to.

        key_states ``[B, K, L, D]`` and value_states ``[B, K, L, Dv]``, right-aligned per row. Keywords, given by
        the attention function of `condense.apply`: query_states, the queries ``[B, H, L, D]``;
        scale, the softmax scale; counts, real tokens per row (int64 CPU ``[B]``) or None; trailing, slots at the
        end that were real in every row before alignment (default: the smallest count); latent_width, as in
        `condense.methods.for_latents` (default: ordinary keys and values).
        Raises ValueError, state unchanged, if called by anything else and for another dtype than that of the past.
        """
        refuse_stock_tokens(kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.past
        if past is not None:
            refuse_other_dtype(past.window_k.dtype, key_states.dtype)
        counts: Tensor | None = kwargs.get("counts")
        latent_width: int | None = kwargs.get("latent_width")
        sources, past = extend(
            self.method if latent_width is None else for_latents(self.method, latent_width),
            past,
            key_states,
            value_states,
            kwargs["query_states"],
            scale=kwargs["scale"],
            counts=counts,
        )
        L = key_states.shape[2]
        self.past = past
        trailing = kwargs.get("trailing", L if counts is None else int(counts.min()))
        self._count(L, trailing)
        return sources, None

    def can_step(self, k: Tensor, v: Tensor, latent_width: int | None = None) -> bool:
        """True if `step` reads tokens like k ``[B, K, 1, D]`` and v: there is a past, and the Triton step runs here."""
        if self._steps is not None:
            return self._steps.fits(k)
        if self._past is None or self._past.window_k.dtype != k.dtype:
            return False
        widths, latent = (k.shape[3], v.shape[3]), latent_width or 0
        return step_backend(k.device, k.dtype, widths, self._plan, latent=latent) == "triton"

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
        """Read one token per row and return its attention ``[B, H, 1, Dv]``, where `can_step`: without gradients.

        q ``[B, H, 1, D]``, k ``[B, K, 1, D]``, v ``[B, K, 1, Dv]``; real bool or integer CPU ``[B]``: rows whose token
        counts. latent_width as in `condense.caches.StaticCondensedLayer.step`. No host waits for the device.
        """
        if self._steps is None:
            assert self._past is not None
            self._steps = RingState(self.method, self._plan, self._past, latent_width or 0)
            self._past = None
        out = self._steps.step(q, k, v, scale=scale, real=real)
        self._count(1, 1 if real is None else int(real.min()))
        return out

    def _count(self, L: int, trailing: int) -> None:
        """L new slots, the last ``trailing`` of which are real in every row."""
        self._num_slots += L
        self._num_real_slots = self._num_real_slots + L if trailing == L else trailing

    @property
    def keys(self) -> Tensor | None:
        """Exact keys of the window ``[B, K, N, D]``."""
        past = self.past
        return None if past is None else past.window_k

    @keys.setter
    def keys(self, value: None) -> None:
        """Transformers' base class initialises the attribute; the state itself is `past`."""

    @property
    def values(self) -> Tensor | None:
        """Exact values of the window ``[B, K, N, Dv]``."""
        past = self.past
        return None if past is None else past.window_v

    @values.setter
    def values(self, value: None) -> None:
        """See `keys`."""

    def get_seq_length(self) -> int:
        """Tokens seen, padding included: what positions and masks are counted from."""
        return self._num_slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers every slot ever seen; see `condense.models.masks`."""
        return self._num_slots + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name up to transformers 5.17

    def reset(self) -> None:
        """Forget everything."""
        self.past = None
        self.is_initialized = False
        self._num_slots = self._num_real_slots = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest ``-tokens_to_remove`` tokens (assisted decoding).

        Exact for at least `condense.functional.SLACK` tokens. Raises ValueError, state unchanged, for more than
        is kept, for padding among them, and for a positive number.
        """
        count = -int(tokens_to_remove)  # transformers 5.17 passes a tensor
        if count < 0:
            raise ValueError(f"tokens_to_remove must be <= 0, got {-count}")
        if count == 0 or (self._past is None and self._steps is None):
            return
        if count > self._num_real_slots:
            raise ValueError(
                f"crop: the last {count} tokens include padding or more than the {self._num_slots} seen; "
                "start from a new cache instead"
            )
        if self._steps is not None:
            self._check_crop(count, self._steps.seen - count, self._steps.num_band, self._steps.num_queries)
            self._steps.crop(count)
        else:
            self._crop_past(count)
        self._num_slots -= count
        self._num_real_slots -= count

    def _check_crop(self, count: int, seen: PerRow, N: int, Q: int) -> None:
        """Refuse to take tokens back beyond what then is needed; N columns of tokens and Q of queries are at hand."""
        needed = max_row(seen - first_needed(self.method, seen))
        queries_needed = min(max(0, self.method.num_summary - 1), max_row(seen))
        too_few = N - count < needed or (queries_needed > 0 and Q - count < queries_needed)
        if too_few or min_row(seen) < 0:  # a prompt read at once is condensed to its last token
            raise ValueError(
                f"crop: {count} tokens lie beyond what a condensed cache can take back; propose fewer tokens at a "
                "time (num_assistant_tokens, prompt_lookup_num_tokens) or start from a new cache"
            )

    def _crop_past(self, count: int) -> None:
        past = self._past
        assert past is not None
        N, Q, seen = past.window_k.shape[2], past.summary_q.shape[2], past.seen - count
        self._check_crop(count, seen, N, Q)
        num_prefix = max_row(num_entries(self.method, seen, past.origin))
        self._past = past._replace(
            entries_k=past.entries_k[:, :, :num_prefix],
            entries_v=past.entries_v[:, :, :num_prefix],
            window_k=past.window_k[:, :, : N - count],
            window_v=past.window_v[:, :, : N - count],
            summary_q=past.summary_q[:, :, : max(0, Q - count)],
            seen=seen,
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of ``beam_idx`` (int ``[B]``)."""
        self._map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times."""
        self._map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the rows in ``indices`` (int ``[n]`` or bool ``[B]``)."""
        self._map_rows(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._map_tensors(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to the device of the layer."""
        self._map_tensors(lambda x: x.to(self.device, non_blocking=True))

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        # rows alike: no need to wait for indices from the GPU
        self._map_tensors(change, lambda x: int_if_equal(change(x)) if isinstance(x, Tensor) else x)

    def _map_tensors(
        self, change: Callable[[Tensor], Tensor], change_number: Callable[[PerRow], PerRow] = lambda x: x
    ) -> None:
        if self._past is not None:
            self._past = Past(*map(change, self._past.tensors), *map(change_number, self._past[5:]))
        if self._steps is not None:
            self._steps.map_tensors(change, change_number)
