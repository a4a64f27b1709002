"""The part of transformers' cache contract that follows from buffers of fixed size at fixed addresses."""

from enum import Enum, auto
from typing import NamedTuple, NoReturn

from torch import Tensor

from condense.caches.base import CondensedCacheLayer
from condense.methods import FirstEntries
from condense.ops.tensors.per_row import PerRow


class Expected(Enum):
    """The tokens that a static layer gets next."""

    FIRST_ENTRIES = auto()  # tokens of which first entries are made: by `read`, even of a single one
    PLAIN_PROMPT = auto()  # its first tokens, none of them padding: a compiled forward can read them as one graph
    ANY = auto()


class HostCounts(NamedTuple):
    """Numbers of a static layer that the host knows without waiting for the device.

    slots: slots seen. rows: ``seen`` and ``first`` of the state (`condense.state.LayerState`) after a `read`;
    None after a step, which counts tokens on the device alone.
    """

    slots: int = 0
    rows: tuple[PerRow, FirstEntries] | None = None


class FixedCacheLayer(CondensedCacheLayer):
    """Base of static condensed layers: the sizes that they give, and the calls that they refuse."""

    is_compileable = True
    is_croppable = False
    is_sliding = False
    max_cache_len: int

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask has a column for every slot that there will ever be."""
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        """``max_cache_len``."""
        return self.max_cache_len

    def _refuse_length(self, num_slots: int, L: int) -> NoReturn:
        raise ValueError(
            f"static cache: wanted at most {self.max_cache_len} tokens (max_cache_len), got {num_slots} and {L} more; "
            "make it longer, or use a cache that grows (cache_implementation unset)"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """As `check_crop`."""
        self.check_crop(tokens_to_remove)

    def check_crop(self, tokens_to_remove: int) -> int:
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
