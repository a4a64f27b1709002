"""The arguments of ``read``, the part of transformers' cache contract that growing and static layers share, what static
layers know of the tokens to come, and the memory that a cache holds.

Shapes: B rows, K KV heads, L new tokens, D and Dv widths.
"""

from abc import abstractmethod
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.utils import ALL_CACHE_NAMES

from condense.caches.store import Store
from condense.functional import extend, keep_tokens
from condense.methods import Context, Method, check_trainable
from condense.ops import StepState
from condense.ops.tensors.per_row import PerRow, max_row
from condense.plan import ForwardPlan
from condense.state import LayerState, num_entries

# the name of a cache among the arguments of a forward and in its output: "past_key_values" up to transformers 5.23
CACHE: str = ALL_CACHE_NAMES[0]


class ReadRequest(NamedTuple):
    """Arguments that a condensed model gives to a layer with new keys and values.

    q ``[B, H, L, D]``: summary queries are means of these. scale: softmax scale. plan: which of the tokens are real.
    trailing: number of last slots that are real in every row, before rows were aligned. latent_width: as in
    `condense.Method.for_latents`, None for ordinary keys and values.
    """

    q: Tensor
    scale: float
    plan: ForwardPlan
    trailing: int
    latent_width: int | None = None


def refuse_others(rows: int, dtype: torch.dtype, k: Tensor) -> None:
    """Raise ValueError unless new tokens, k ``[B, K, L, D]``, have the rows and dtype of those that a layer holds."""
    if k.shape[0] != rows:
        raise ValueError(
            f"condensed cache: wanted {rows} rows, for which it was made, got {k.shape[0]}; make a new cache for "
            "another batch"
        )
    if k.dtype != dtype:
        raise ValueError(
            f"condensed cache: wanted {dtype}, for which it was made, got {k.dtype}; make a new cache, and use "
            "autocast in all calls or in none"
        )


def _refuse_tensors(layer: CacheLayerMixin) -> NoReturn:
    raise ValueError(
        "a condensed cache has no keys and values of all tokens to take out: give the cache itself to the model, or "
        "call condense.restore(model) and read the tokens into a new one"
    )


class CondensedCacheLayer(CacheLayerMixin):
    """Base of condensed cache layers: each holds the state of one attention layer under ``method``.

    prompt: the state of a prompt that waits for its second reading (`condense.Method.reread`), None otherwise. dropped:
    slots of that prompt, less the tokens that its longest row kept. latent_width: width of the latents in keys, as in
    `condense.Method.for_latents`; 0 for ordinary keys and values.
    """

    method: Method
    store: Store
    prompt: LayerState | None = None
    dropped: int = 0
    latent_width: int = 0

    def read(self, k: Tensor, v: Tensor, request: ReadRequest) -> Context:
        """Read new tokens and return the sources that their queries attend to; may wait for the device after steps.

        k ``[B, K, L, D]`` and v ``[B, K, L, Dv]``, right-aligned per row.
        Raises ValueError, state unchanged, for another dtype or number of rows than those of earlier tokens, for more
        tokens than there is room for, for tokens that require gradients under a method that looks ahead, and for those
        that would follow a prompt which still waits for its second reading.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in (request.q, k, v)):
            check_trainable(self.method)
        if self.prompt is not None:
            raise ValueError(
                f"the prompt in this cache was not read again for {type(self.method).__name__}: its forward failed, or "
                "layers were called without their model. Start from a new cache"
            )
        self.latent_width = request.latent_width or 0
        before = self._before(k, v)
        reread = self.method.reread if before is None else None
        reader = self._method_of_tokens if reread is None else reread
        context, new_state = extend(reader, before, request.q, k, v, scale=request.scale, plan=request.plan)
        if reread is None:
            self._hold(before, new_state())
        else:
            self.prompt = new_state()
        return context

    def keep(self, kept: Tensor, counts: Tensor) -> None:
        """Drop all tokens of ``prompt`` but those where kept, bool ``[B, K, L]``, is True; counts int64 CPU ``[B]``."""
        assert self.prompt is not None
        self._hold(None, keep_tokens(self._method_of_tokens, self.prompt, kept, counts))
        # set last: a layer that failed above still waits, and takes no further tokens
        self.prompt, self.dropped = None, self.count_slots() - max_row(counts)

    @property
    def _method_of_tokens(self) -> Method:
        return self.method.for_latents(self.latent_width) if self.latent_width else self.method

    @abstractmethod
    def _before(self, k: Tensor, v: Tensor) -> LayerState | None:
        """The state to which new tokens k and v are added, None if they are the first; raises errors of `read`."""

    @abstractmethod
    def _hold(self, before: LayerState | None, after: LayerState) -> None:
        """Keep the state ``after``, which the newest call made from ``before``; None if that call was the first."""

    def fetch(self) -> bool:
        """Begin to copy stored tokens to the device for the next `read`; False for a layer without a store.

        As many are copied as rows without padding have stored.
        """
        has_store = self.store.settings.choice is not None
        if has_store and self.buffers is not None:
            self.store.fetch(self.buffers, int(num_entries(self.method, self.count_slots() - self.dropped)))
        return has_store

    @property
    @abstractmethod
    def buffers(self) -> StepState | None:
        """The buffers of the layer, None while it has none."""

    def count_slots(self) -> int:
        """Tokens seen, padding included; waits for the device if only it has the count."""
        return int(self.get_seq_length())

    @abstractmethod
    def count_tokens(self) -> PerRow:
        """Real tokens per row, without those that a second reading dropped; may wait for the device."""

    @property
    def host_bytes(self) -> int:
        """Bytes of a store that was asked for in host memory, also beside tensors on a CPU; 0 without one."""
        return self.buffers.store.nbytes if self.buffers is not None and self.store.on_host else 0

    @abstractmethod
    def check_crop(self, tokens_to_remove: int) -> int:
        """The number of tokens that ``crop`` takes back. Raises ValueError if it cannot take back so many."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, request: object = None, **kwargs: Any
    ) -> tuple[Context, None]:
        """`read`, called through ``Cache.update``. Raises ValueError, state unchanged, unless ``request`` is given."""
        if not isinstance(request, ReadRequest):
            raise ValueError(
                "this cache holds condensed layers, which only a condensed model can fill: call condense.apply(model, "
                "...) on the model, or give the stock model a new cache"
            )
        return self.read(key_states, value_states, request), None

    # what iterating over a DynamicCache reads; setting them, as the base class does, does nothing
    keys = values = property(_refuse_tensors, lambda self, value: None)

    def get_max_cache_shape(self) -> int:
        """The same as ``get_max_length``, under its name up to transformers 5.17."""
        return int(self.get_max_length())


class Expected(Enum):
    """The tokens that a static layer gets next."""

    FIRST_ENTRIES = auto()  # tokens that become first entries: `read` takes them, even a single one
    PLAIN_PROMPT = auto()  # first tokens, none of them padding: a compiled forward can read them as one graph
    ANY = auto()


def cache_nbytes(cache: Cache, device: str | None = None) -> int:
    """Bytes allocated by a cache with any kind of layers: each tensor storage is counted whole and once.

    device: count only tensors on devices of this type, such as "cuda" or "cpu" (where ``Recall(store="host")`` keeps
    most); None: all. A view counts as the whole storage that it keeps alive.
    Raises ValueError if ``cache`` is not a transformers cache.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"cache must be a transformers Cache, got {type(cache).__name__}")
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in _tensors(vars(cache), set())
        if device is None or tensor.device.type == device
    }
    return sum(storages.values())


def _tensors(value: Any, visited: set[int]) -> Iterator[Tensor]:
    """All tensors that an object holds, in its attributes and containers at any depth; each object is visited once."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in visited or isinstance(value, type):
        return
    visited.add(id(value))
    children = value if isinstance(value, dict | list | tuple | set) else getattr(value, "__dict__", {})
    for child in list(children.values() if isinstance(children, dict) else children):
        yield from _tensors(child, visited)
