"""Bytes that a cache keeps in one layer and that a step reads: counts of rows times the bytes of the buffers' rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from condense.methods import Method, step_settings
from condense.models.counts import kept
from condense.ops.step import Per, fields_of
from condense.state import num_entries

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class CachedHeads(NamedTuple):
    """Cached heads: their number, and widths of keys and values; for latents value_width is 0."""

    num: int
    width: int
    value_width: int

    def row_bytes(self, method: Method, itemsize: int) -> dict[tuple[str, Per], int]:
        """Bytes of one row of each buffer of all heads, by its name and what the row stands for.

        Raises ValueError for numbers of another size than 2, 4 and 8 bytes.
        """
        if itemsize not in DTYPES:
            raise ValueError(f"itemsize must be 2, 4 or 8, got {itemsize}")
        fields = fields_of(step_settings(method), self.num, (self.width, self.value_width), DTYPES[itemsize])
        return {(field.name, field.per): self.num * field.nbytes for field in fields}

    def cached_bytes(self, method: Method, length: int, itemsize: int) -> tuple[int, int]:
        """Bytes that a cache keeps on the device and in host memory after ``length`` tokens."""
        counts, choice = kept(method, length), method.layout.choice
        on_host = choice is not None and choice.store.on_host
        held = {False: 0, True: 0}
        for (_, per), nbytes in self.row_bytes(method, itemsize).items():
            held[on_host and per is Per.STORED] += counts.get(per, 0) * nbytes
        return held[False], held[True]

    def step_bytes(self, method: Method, length: int, itemsize: int) -> int:
        """Bytes that a step after ``length`` tokens reads: index, entries and their biases, open groups, the window."""
        choice, groups, g = method.layout.choice, int(num_entries(method, length)), method.layout.rule.chunk
        opened = 0 if choice is None else choice.quota.at(groups)
        counts = dict.fromkeys(("signs", "steps", "biases"), groups) | {"store": opened * g}
        counts |= dict.fromkeys(("entries_k", "entries_v"), groups - opened)
        counts |= dict.fromkeys(("ring_k", "ring_v"), length - groups * g)
        return sum(counts.get(name, 0) * nbytes for (name, _), nbytes in self.row_bytes(method, itemsize).items())
