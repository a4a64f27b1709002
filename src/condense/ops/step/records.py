"""The record of a closed group: all that is kept of it for one KV head, in one row of bytes.

A record holds the parts that `condense.ops.step.state.fields_of` names for entries and for stored tokens: keys and
values of the entry, its bias, the index, the exact tokens. So pages need one kind of row for every method, and another
part is another line of that table. Each part begins at a multiple of 16 bytes, so that kernels load whole words.

Shapes: K KV heads, G groups of g tokens, C bytes of a record, D and Dv widths.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.step.settings import StepSettings
from condense.ops.step.state import Per, fields_of

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

    def of(self, records: Tensor) -> Tensor:
        """This part of records uint8 ``[..., C]``, whose last stride is 1: ``[..., columns]``, a view."""
        return records[..., self.start : self.stop].view(self.dtype)


class RecordFormat(NamedTuple):
    """The layout of a record. parts: those that are not empty, in their order. nbytes: C."""

    parts: tuple[Part, ...]
    nbytes: int

    def pack(self, kept: dict[str, Tensor]) -> Tensor:
        """Records uint8 ``[B, K, G, C]`` of the parts ``[B, K, G, columns]`` by name, or ``[B, K, G * g, columns]``."""
        first, like = self.parts[0], kept[self.parts[0].name]
        num_groups = like.shape[2] // math.prod(first.shape[:-1])
        records = like.new_zeros(*like.shape[:2], num_groups, self.nbytes, dtype=torch.uint8)
        for part in self.parts:
            of_groups = kept[part.name].unflatten(2, (-1, *part.shape[:-1])).flatten(3).contiguous()
            records[..., part.start : part.stop] = of_groups.view(torch.uint8)
        return records

    def views(self, records: Tensor) -> dict[str, Tensor]:
        """The parts of records uint8 ``[..., C]``, whose last stride is 1, by name: views ``[..., columns]``."""
        return {part.name: part.of(records) for part in self.parts}


@functools.lru_cache(maxsize=256)  # the same for all layers, in every step
def record_format(settings: StepSettings, widths: tuple[int, int], dtype: torch.dtype) -> RecordFormat:
    """The layout of the records of a method's groups. widths: D and Dv; dtype: of the tokens.

    Raises ValueError for widths that the store cannot hold.
    """
    parts, end = [], 0
    for field in fields_of(settings, 1, widths, dtype):
        shape = {Per.ENTRY: field.width, Per.STORED: (settings.rule.chunk, *field.width)}.get(field.per)
        if shape is not None and math.prod(shape) > 0:
            parts.append(Part(field.name, end, shape, field.dtype))
            end = -(-parts[-1].stop // RECORD_UNIT) * RECORD_UNIT
    return RecordFormat(tuple(parts), end)
