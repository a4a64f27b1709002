"""The record of a closed group: all that is kept of it for one KV head, in one row of bytes.

A record holds the parts that `condense.ops.step.state.fields_of` names for entries and for stored tokens: keys and
values of the entry, its bias, the index, the exact tokens. So pages need one kind of row for every method, and another
part is another line of that table. Each part begins at a multiple of 16 bytes, so that kernels load whole words.

A page has N records of each KV head side by side, in three planes: first the index of all, then the entries of all,
then the stored tokens. A step reads index or entries of all groups in long stretches, but tokens of few. A store in
host memory has its plane there, in pages with the same numbers (`condense.ops.step.pages.PagedState.store`). If copies
of its groups may stand in slots, the index also has a *stamp*, by which a slot knows whether its copy still equals the
record (`condense.ops.step.pages.PagedSlots`).

Shapes: K KV heads, G groups of g tokens, P pages of N records, C bytes of a record, D and Dv widths.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.entries import round_up
from condense.ops.step.settings import StepSettings
from condense.ops.step.state import Per, fields_of

# parts of each plane
_PLANES = ("signs", "steps"), ("entries_k", "entries_v", "biases"), ("store",)
# alignment of parts and records, in bytes; stamps are aligned to their own size
RECORD_UNIT = 16
STAMP = "stamps"


class Part(NamedTuple):
    """One part of a record.

    name: of its buffer in `condense.ops.step.StepState`, or `STAMP`. start: offset in bytes in its plane. shape: of its
    numbers, ``(columns,)``, or ``(g, columns)`` for a part with numbers of each token. dtype: of these numbers.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def columns(self) -> int:
        """Numbers of this part in a record."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Offset in bytes of the part's end."""
        return self.start + self.columns * self.dtype.itemsize


class RecordFormat(NamedTuple):
    """The layout of a record. parts: those of each plane that are not empty, in their order. sizes: bytes of a record
    in each plane. apart: the last plane lies in pages of its own.
    """

    parts: tuple[tuple[Part, ...], ...]
    sizes: tuple[int, ...]
    apart: bool

    @property
    def nbytes(self) -> int:
        """Bytes of a record, C, without a plane that lies apart."""
        return sum(self.sizes[: len(self.sizes) - self.apart])

    @property
    def nbytes_apart(self) -> int:
        """Bytes of a record in the plane that lies apart; 0 without one."""
        return self.sizes[-1] if self.apart else 0

    @property
    def _kept(self) -> tuple[tuple[tuple[Part, ...], int], ...]:
        """Parts and sizes of the planes that are not empty."""
        return tuple((parts, size) for parts, size in zip(self.parts, self.sizes, strict=True) if size > 0)

    def pack(self, kept: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Rows of bytes for each plane that is not empty, uint8 ``[B, K, G, n]`` with n from ``sizes``. kept: the parts
        by name, ``[B, K, G, columns]`` or ``[B, K, G * g, columns]``.
        """
        given = {
            part.name: kept[part.name].unflatten(2, (-1, *part.shape[:-1])).flatten(3).contiguous()
            for part in sum(self.parts, ())
            if part.name != STAMP
        }
        like = next(iter(given.values()))
        records = like.new_zeros(*like.shape[:3], sum(self.sizes), dtype=torch.uint8)
        planes = records.split_with_sizes([size for _, size in self._kept], -1)
        for plane, (parts, _) in zip(planes, self._kept, strict=True):
            for part in parts:
                if part.name != STAMP:
                    plane[..., part.start : part.stop] = given[part.name].view(torch.uint8)
        return planes

    def planes(self, pages: Tensor, store: Tensor | None = None) -> tuple[Tensor, ...]:
        """Views ``[..., N, n]``, n from ``sizes``, of the planes that are not empty in pages uint8 ``[..., N, C]``.

        The last two dimensions of pages are contiguous. store: the plane that lies apart.
        """
        N, sizes = pages.shape[-2], [size for _, size in self._kept[: len(self._kept) - self.apart]]
        planes = pages.flatten(-2).split_with_sizes([N * size for size in sizes], -1)
        views = tuple(x.unflatten(-1, (N, size)) for x, size in zip(planes, sizes, strict=True))
        return views if store is None else (*views, store)

    def views(self, pages: Tensor, store: Tensor | None = None) -> dict[str, Tensor]:
        """Parts of records by name, as views ``[..., N, columns]`` of pages; arguments as in `planes`."""
        planes = zip(self.planes(pages, store), self._kept, strict=True)
        return {x.name: plane[..., x.start : x.stop].view(x.dtype) for plane, (parts, _) in planes for x in parts}


@functools.lru_cache(maxsize=256)  # the same for all layers, in every step
def record_format(settings: StepSettings, widths: tuple[int, int], dtype: torch.dtype) -> RecordFormat:
    """The layout of the records of a method's groups. widths: D and Dv; dtype: of the tokens.

    Raises ValueError for widths that the store cannot hold.
    """
    fields, planes, sizes = {field.name: field for field in fields_of(settings, 1, widths, dtype)}, [], []
    choice = settings.choice
    has_slots = choice is not None and choice.store.slots > 0
    for names in _PLANES:
        parts, end = [], 0
        for field in map(fields.__getitem__, names):
            shape = {Per.ENTRY: field.width, Per.STORED: (settings.rule.chunk, *field.width)}.get(field.per)
            if shape is not None and math.prod(shape) > 0:
                parts.append(Part(field.name, end, shape, field.dtype))
                end = round_up(parts[-1].stop, RECORD_UNIT)
        if names is _PLANES[0] and has_slots:
            # the stamp mostly fits into bytes that the parts before it leave empty
            parts.append(Part(STAMP, round_up(parts[-1].stop, 4), (1,), torch.int32))
            end = round_up(parts[-1].stop, RECORD_UNIT)
        planes.append(tuple(parts))
        sizes.append(end)
    return RecordFormat(tuple(planes), tuple(sizes), choice is not None and choice.store.on_host)
