"""Pages of the tokens, entries or records, and mean queries of requests, and the new tokens of each.

Shapes: R requests, T new tokens of all requests, K KV heads, P pages, N slots of a page, C columns of a slot, D and Dv
widths, g tokens per group.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from condense.ops.latents import Ranks, UpProjection
from condense.ops.spans import SharedByLayers
from condense.ops.step.settings import StepSettings
from condense.ops.types import NO_EXTRAS, Extras

# slots are copied in words of this dtype
_WORD = torch.int64


class Pages(NamedTuple):
    """Pages of one kind, and a table of the pages of each request.

    cache: ``[P, K, N, C]``, whose last stride is 1. table: int32 ``[R, n]`` on the same device; column i is the page
    that holds slots ``[i * N, (i + 1) * N)`` of a request.
    """

    cache: Tensor
    table: Tensor

    @property
    def slots(self) -> int:
        """Slots of a page, N."""
        return self.cache.shape[2]

    def view(self, dtype: torch.dtype) -> Self:
        """The same pages, their bytes read as numbers of another dtype."""
        return self._replace(cache=self.cache.view(dtype))

    def columns(self, start: int, stop: int | None = None) -> Self:
        """The same pages with columns ``[start, stop)`` of each slot; by default all from ``start`` on."""
        return self._replace(cache=self.cache[..., start:stop])

    def rows(self, start: int, stop: int) -> Self:
        """The pages of requests ``[start, stop)``."""
        return self._replace(table=self.table[start:stop])


class Places(NamedTuple):
    """Indices of slots for all KV heads, ``cache[page, head, slot]``: three int64 tensors ``[B, K, n]``.

    They are contiguous, because PyTorch would copy indices with differing strides at each use.
    """

    page: Tensor
    head: Tensor
    slot: Tensor

    @classmethod
    def of(cls, page: Tensor, slot: Tensor, K: int) -> Self:
        """Places of slots in all of K heads; page and slot ``[B, n]``."""
        head = torch.arange(K, device=page.device)[:, None]
        return cls(*(x.contiguous() for x in torch.broadcast_tensors(page[:, None], head, slot[:, None])))


class PagedSlots(NamedTuple):
    """Copies on the device of groups in host memory that were open lately, for the first R requests of a step.

    Slots belong to a place in the batch, where requests come and go, while their records may be written anew. So each
    slot names the record that it copies, and its stamp: a record's stamp (`condense.ops.step.records`) is the number on
    the clock when it was written, and each step that may copy records advances the clock. A copy is valid while the
    table of the request in its place leads to that record and the record has that stamp: a record is not copied
    between two writes with one stamp, so it still holds what was copied.

    slots ``[R, K, S * g, C]``, held and order int32 ``[R, K, S]``: as in `condense.ops.step.StepState`. tags
    int32 ``[R, K, S, 2]``: number of the record in each slot (its page times the slots of a page, plus its slot in the
    page), and its stamp. clock int32 ``[1]``.
    """

    slots: Tensor
    held: Tensor
    order: Tensor
    tags: Tensor
    clock: Tensor

    @classmethod
    def empty(cls, rows: int, K: int, widths: tuple[int, int], settings: StepSettings, like: Tensor) -> Self:
        """Empty slots for ``rows`` requests. widths: D and Dv; like: a tensor of the tokens' dtype and device."""
        assert settings.choice is not None
        form, S = settings.store_format, settings.choice.store.slots
        tags = like.new_zeros(rows, K, S, 2, dtype=torch.int32)
        shape = rows, K, S * settings.rule.chunk, form.width(*widths, like.itemsize)
        return cls(
            like.new_zeros(shape, dtype=form.dtype(like.dtype)),
            torch.full_like(tags[..., 0], -1),
            torch.arange(S, dtype=torch.int32, device=like.device).repeat(rows, K, 1),
            tags,
            tags.new_zeros(1),
        )

    def rows(self, start: int, stop: int) -> Self:
        """The slots of requests ``[start, stop)``, of which there may be fewer."""
        slots, held, order, tags = (x[start:stop] for x in self[:4])
        return self._replace(slots=slots, held=held, order=order, tags=tags)


class PagedState(NamedTuple):
    """The state of all requests in one layer, on one device.

    window: in the dtype of k, slot t holds the token at position t, ``[k | v]``, C = D + Dv. If queries see the groups
    that they do not open as one token, ``[k | v | s]``, C from `window_columns`: the slots of group j's g tokens hold
    the sum, float64, of the values of groups 0 to j, `sum_part` numbers each, in order; s of other tokens is not read.
    Requests that share a prefix share whole pages of entries.
    entries: slot ``j + summary_delay / g`` holds the entry of group j, ``[k | v]`` in the dtype of k. Or pages are
    uint8, for any settings and always with a choice: then the slot holds the record of group j, C bytes, and records of
    a page lie side by side as `condense.ops.step.record_format` says. With a choice the delay is 0: a record is written
    when the last token of its group is read, and depends on the group's tokens alone. Pages of records begin at
    multiples of 16 bytes.
    store: the stored tokens of records if they lie in host memory: uint8 ``[P, K, N, n]``, contiguous, in pages and
    slots of the same numbers as those of the entries; pinned beside a GPU. Else None: they stand in the records.
    ring: in the dtype of k, slot ``t % N`` of a request's only page holds the mean query of position t in its first D
    columns; None for methods that need one query or none (`condense.serving.plan`).
    up: the up-projections, if tokens are latents (MLA): K is 1, a key is ``[c ; k_rope]`` and Dv is 0. Else None.
    extras: of the layer, as in `condense.ops.attend`; groups are chosen without them.
    slots: copies of groups of ``store``, for steps of kernels alone; None: steps read all open groups from ``store``.
    longest: the most tokens of a request; None: as many as tables have room for.
    ranks: the processes over which heads of latents are spread, each with all pages; None if this one has all heads.
    Slots that a request has not filled, or needs no more, are not read and may hold anything.
    """

    window: Pages
    entries: Pages
    ring: Pages | None
    up: UpProjection | None = None
    extras: Extras = NO_EXTRAS
    store: Tensor | None = None
    slots: PagedSlots | None = None
    longest: int | None = None
    ranks: Ranks | None = None

    @property
    def latent(self) -> int:
        """Columns of the keys that are values, 0 without latents: as in `condense.ops.step.call.StepCall`."""
        return 0 if self.up is None else self.up.latent_width

    @property
    def holds_records(self) -> bool:
        """True if entries stand in records."""
        return self.entries.cache.dtype == torch.uint8

    def most_groups(self, g: int) -> int:
        """The most groups of g tokens that a request can have."""
        room = self.entries.table.shape[1] * self.entries.slots
        return room if self.longest is None else min(room, -(-self.longest // g))

    def rows(self, start: int, stop: int) -> Self:
        """The state of requests ``[start, stop)``."""
        ring = None if self.ring is None else self.ring.rows(start, stop)
        slots = self.slots
        if slots is not None:
            slots = slots.rows(start, stop) if start < len(slots.held) else None
        window, entries = self.window.rows(start, stop), self.entries.rows(start, stop)
        return self._replace(window=window, entries=entries, ring=ring, slots=slots)


@dataclass(frozen=True)
class NewTokens(SharedByLayers):
    """The new tokens of all requests, packed one request after another.

    starts: R + 1 ints: request r has new tokens ``[starts[r], starts[r + 1])``. seen: R ints, tokens of each request,
    the new ones included. seen_on_device: the same, int32 ``[R]``. num_steps: so many requests, the first ones, have
    one new token each. If all have one, the last ones may be unused places, for which ``seen_on_device`` is 0.
    """

    starts: list[int]
    seen: list[int]
    seen_on_device: Tensor
    num_steps: int = 0
    _found: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @functools.cached_property
    def before(self) -> Tensor:
        """Tokens of the requests before each, int64 ``[R]`` on the device; all layers share what the first computes.

        In a captured graph it is computed anew by every replay, if it was not asked for before the capture.
        """
        return self.seen_on_device.cumsum(0) - self.seen_on_device


def sum_part(width: int, g: int) -> int:
    """Count of a sum's ``width`` numbers that each of a group's g tokens holds; the last ones may hold fewer."""
    return -(-width // g)


def window_columns(D: int, Dv: int, settings: StepSettings, itemsize: int) -> tuple[int, int]:
    """The column of a window token at which its part of a sum begins, and all its columns, of ``itemsize`` bytes each.

    Sums begin at multiples of 8 bytes. Both numbers are D + Dv if there are no sums.
    """
    if not settings.sees_rest:
        return D + Dv, D + Dv
    start = -(-(D + Dv) * itemsize // 8) * 8
    return start // itemsize, (start + 8 * sum_part(Dv or D, settings.rule.chunk)) // itemsize


# a step of kernels attends at once to requests with so many times the groups that a pool of pages has room for:
# requests share the pages of common prefixes, so all together may have many times more
_AT_ONCE = 8


def rows_at_once(records: Pages) -> int:
    """Requests that a step of kernels over these pages of records attends to at once, however long they are: their
    groups fill `_AT_ONCE` pools of pages at most, for which there is scratch memory.
    """
    return max(1, _AT_ONCE * records.cache.shape[0] // records.table.shape[1])


def copied(cache: Tensor, places: Places) -> Tensor:
    """A copy ``[B, K, n, C]`` of the slots at ``places`` of a cache ``[P, K, N, C]``."""
    return words(cache)[places].view(cache.dtype)


def words(x: Tensor) -> Tensor:
    """View x as words of 8 bytes, of which a GPU copies as many per second as of bytes; x itself if strides forbid."""
    size, unit = x.element_size(), _WORD.itemsize
    places = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
    return x.view(_WORD) if x.stride(-1) == 1 and all(n * size % unit == 0 for n in places) else x


def as_words(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return all tensors as `words`, or all as they are, so that one can be written to another."""
    seen = tuple(words(x) for x in tensors)
    return seen if all(x.dtype == _WORD for x in seen) else tensors
