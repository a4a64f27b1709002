"""A growing condensed cache layer under transformers' cache contract.

It reports the tokens it has *seen* as its length, while what it stores is entries, the exact window and
a little slack. Shapes as in `condense.functional`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from condense.functional import Past, Sources, extend, first_needed, num_entries
from condense.methods import Method, on_latents
from condense.ops.rows import PerRow, agreed, least, most


class CondensedLayer(CacheLayerMixin):
    """One attention layer's condensed past. All state follows beams, selection, repetition, crop and reset."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method
        self.past: Past | None = None
        self.device = torch.device("cpu")
        self._num_slots = 0
        # newest slots that hold a real token in every row: what may be cropped without looking at padding
        self._num_real_slots = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember where the state lives; tensors are made by the first `update`."""
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Sources, None]:
        """Read new tokens and return what their queries attend to.

        key_states ``[B, K, L, D]`` and value_states ``[B, K, L, Dv]``, right-aligned per row. Keywords, given by
        the attention function of `condense.apply`: query_states, the queries ``[B, H, L, D]``;
        scale, the softmax scale; counts, real tokens per row (int64 CPU ``[B]``) or None; trailing, slots at the
        end that were real in every row before alignment (default: the smallest count); latent_width, as in
        `condense.methods.on_latents` (default: ordinary keys and values); backend.
        Raises ValueError if called by anything else.
        """
        if "query_states" not in kwargs:
            raise ValueError(
                "this cache holds condensed layers, which only a condensed model can fill: call condense.apply(model, "
                "...) on the model, or give the stock model a new cache"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        counts: Tensor | None = kwargs.get("counts")
        latent_width: int | None = kwargs.get("latent_width")
        sources, past = extend(
            self.method if latent_width is None else on_latents(self.method, latent_width),
            self.past,
            key_states,
            value_states,
            kwargs["query_states"],
            scale=kwargs["scale"],
            counts=counts,
            backend=kwargs.get("backend", "auto"),
        )
        L = key_states.shape[2]
        self.past = past
        self._num_slots += L
        trailing = kwargs.get("trailing", L if counts is None else int(counts.min()))
        self._num_real_slots = self._num_real_slots + L if trailing == L else trailing
        return sources, None

    @property
    def keys(self) -> Tensor | None:
        """Exact keys of the window ``[B, K, N, D]``."""
        return None if self.past is None else self.past.band_k

    @keys.setter
    def keys(self, value: None) -> None:
        """Transformers' base class initialises the attribute; the state itself is `past`."""

    @property
    def values(self) -> Tensor | None:
        """Exact values of the window ``[B, K, N, Dv]``."""
        return None if self.past is None else self.past.band_v

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
        if count == 0 or self.past is None:
            return
        if count > self._num_real_slots:
            raise ValueError(
                f"crop: the last {count} tokens include padding or more than the {self._num_slots} seen; "
                "start from a new cache instead"
            )
        past, seen = self.past, self.past.seen - count
        N, Q = past.band_k.shape[2], past.summary_q.shape[2]
        needed = most(seen - first_needed(self.method, seen))
        queries_needed = min(max(0, self.method.num_summary - 1), most(seen))
        too_few = N - count < needed or (queries_needed > 0 and Q - count < queries_needed)
        if too_few or least(seen) < 0:  # a prompt read at once is condensed to its last token
            raise ValueError(
                f"crop: {count} tokens lie beyond what a condensed cache can take back; propose fewer tokens at a "
                "time (num_assistant_tokens, prompt_lookup_num_tokens) or start from a new cache"
            )
        num_prefix = most(num_entries(self.method, seen, past.origin))
        self.past = past._replace(
            prefix_k=past.prefix_k[:, :, :num_prefix],
            prefix_v=past.prefix_v[:, :, :num_prefix],
            band_k=past.band_k[:, :, : N - count],
            band_v=past.band_v[:, :, : N - count],
            summary_q=past.summary_q[:, :, : max(0, Q - count)],
            seen=seen,
        )
        self._num_slots -= count
        self._num_real_slots -= count

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
        self._map_tensors(change, lambda x: agreed(change(x)) if isinstance(x, Tensor) else x)

    def _map_tensors(
        self, change: Callable[[Tensor], Tensor], change_number: Callable[[PerRow], PerRow] = lambda x: x
    ) -> None:
        if self.past is not None:
            self.past = Past(*map(change, self.past.tensors), *map(change_number, self.past[5:]))
