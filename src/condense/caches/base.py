"""The part of transformers' cache contract that growing and static condensed layers share.

Shapes: B rows, K KV heads, L new tokens, N exact tokens, D and Dv widths.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from condense.caches.request import ReadRequest, check_request
from condense.caches.store import Store
from condense.methods import Context, Method
from condense.ops import StepState
from condense.state import LayerState


class CondensedCacheLayer(CacheLayerMixin):
    """Base of condensed cache layers: each holds the state of one attention layer under ``method``.

    prompt: the state of a prompt that waits for its second reading (`condense.Reread`), None otherwise.
    """

    method: Method
    store: Store
    prompt: LayerState | None = None

    @abstractmethod
    def read(self, k: Tensor, v: Tensor, request: ReadRequest) -> Context:
        """Read new tokens, k ``[B, K, L, D]`` and v ``[B, K, L, Dv]``, and return the sources for their queries."""

    @abstractmethod
    def keep(self, kept: Tensor, counts: Tensor) -> None:
        """Drop all tokens of ``prompt`` but those where kept, bool ``[B, K, L]``, is True; counts int64 CPU ``[B]``."""

    @abstractmethod
    def fetch(self) -> bool:
        """Begin to copy stored tokens to the device for the next `read`; False for a layer without a store."""

    @abstractmethod
    def _held(self) -> StepState | None:
        """The buffers of the layer, None while it has none."""

    def after_attention(self) -> None:
        """Make later work wait for what `read` has begun to store while the layer attended."""
        if (buffers := self._held()) is not None:
            self.store.settle(buffers)

    @property
    def host_bytes(self) -> int:
        """Bytes of a store for host memory, which on a CPU is the same memory; 0 without one."""
        buffers = self._held()
        return buffers.store.nbytes if buffers is not None and self.store.on_host else 0

    @abstractmethod
    def check_crop(self, tokens_to_remove: int) -> int:
        """The number of tokens that ``crop`` takes back. Raises ValueError if it cannot take back so many."""

    @abstractmethod
    def exact_tokens(self) -> tuple[Tensor, Tensor] | None:
        """Keys ``[B, K, N, D]`` and values ``[B, K, N, Dv]`` of the window, None before the first tokens."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, request: object = None, **kwargs: Any
    ) -> tuple[Context, None]:
        """`read`, called through ``Cache.update``. Raises ValueError, state unchanged, unless ``request`` is given."""
        return self.read(key_states, value_states, check_request(request)), None

    @property
    def keys(self) -> Tensor | None:
        """The keys of `exact_tokens`."""
        tokens = self.exact_tokens()
        return None if tokens is None else tokens[0]

    @keys.setter
    def keys(self, value: None) -> None:
        """Transformers' base class initialises the attribute; the keys themselves are in the state."""

    @property
    def values(self) -> Tensor | None:
        """The values of `exact_tokens`."""
        tokens = self.exact_tokens()
        return None if tokens is None else tokens[1]

    @values.setter
    def values(self, value: None) -> None:
        """See `keys`."""

    def get_max_cache_shape(self) -> int:
        """``get_max_length``, by its name up to transformers 5.17."""
        return int(self.get_max_length())
