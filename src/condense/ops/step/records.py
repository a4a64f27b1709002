"""The record of a closed group: all that is kept of it for one KV head, in one row of bytes.

A record holds the parts that `condense.ops.step.state.fields_of` names for entries and for stored tokens: keys and
values of the entry, its bias, the index, the exact tokens. So pages need one kind of row for every method, and another
part is another line of that table. Each part begins at a multiple of 16 bytes, so that kernels load whole words.

A page has N records of each KV head side by side, in two planes: first the index of all, then the rest of all. A step
reads the index of every group, but the rest of few: so it reads long stretches.

Shapes: K KV heads, G groups of g tokens, P pages of N records, C bytes of a record, D and Dv widths.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.step.settings import StepSettings
from condense.ops.step.state import Per, fields_of

# parts that are read of every group
_INDEX = "signs", "steps"
# parts and records begin at multiples of so many bytes
RECORD_UNIT = 16


class Part(NamedTuple):
    """One part of a record.

    name: of its buffer in `condense.ops.step.StepState`. start: offset in bytes. shape: of a group's numbers there,
    ``(columns,)``, or ``(g, columns)`` of what is kept per token. dtype: of these numbers.
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
    """The layout of a record. parts: those that are not empty, in their order: first the index. index_bytes: of these,
    0 without one. nbytes: C.
    """

    parts: tuple[Part, ...]
    index_bytes: int
    nbytes: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a record in each plane."""
        return self.index_bytes, self.nbytes - self.index_bytes

    def pack(self, kept: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Rows of both planes, uint8 ``[B, K, G, n]`` of the `sizes` n, of the parts ``[B, K, G, columns]`` by name, or
        ``[B, K, G * g, columns]``.
        """
        first, like = self.parts[0], kept[self.parts[0].name]
        num_groups = like.shape[2] // math.prod(first.shape[:-1])
        records = like.new_zeros(*like.shape[:2], num_groups, self.nbytes, dtype=torch.uint8)
        for part in self.parts:
            of_groups = kept[part.name].unflatten(2, (-1, *part.shape[:-1])).flatten(3).contiguous()
            records[..., part.start : part.stop] = of_groups.view(torch.uint8)
        return records[..., : self.index_bytes], records[..., self.index_bytes :]

    def planes(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Both planes of pages uint8 ``[..., N, C]``, whose last two dimensions are contiguous: views ``[..., N, n]``
        of the `sizes` n.
        """
        N = pages.shape[-2]
        index, rest = pages.flatten(-2).split_with_sizes([N * size for size in self.sizes], -1)
        return index.unflatten(-1, (N, self.sizes[0])), rest.unflatten(-1, (N, self.sizes[1]))

    def views(self, pages: Tensor) -> dict[str, Tensor]:
        """The parts of pages as of `planes`, by name: views ``[..., N, columns]``."""
        views, (index, rest) = {}, self.planes(pages)
        for part in self.parts:
            plane, before = (index, 0) if part.name in _INDEX else (rest, self.index_bytes)
            views[part.name] = plane[..., part.start - before : part.stop - before].view(part.dtype)
        return views


@functools.lru_cache(maxsize=256)  # the same for all layers, in every step
def record_format(settings: StepSettings, widths: tuple[int, int], dtype: torch.dtype) -> RecordFormat:
    """The layout of the records of a method's groups. widths: D and Dv; dtype: of the tokens.

    Raises ValueError for widths that the store cannot hold.
    """
    parts, end, index_bytes = [], 0, 0
    for field in sorted(fields_of(settings, 1, widths, dtype), key=lambda field: field.name not in _INDEX):
        shape = {Per.ENTRY: field.width, Per.STORED: (settings.rule.chunk, *field.width)}.get(field.per)
        if shape is not None and math.prod(shape) > 0:
            parts.append(Part(field.name, end, shape, field.dtype))
            end = -(-parts[-1].stop // RECORD_UNIT) * RECORD_UNIT
            index_bytes = end if field.name in _INDEX else index_bytes
    return RecordFormat(tuple(parts), index_bytes, end)
