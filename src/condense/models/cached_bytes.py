"""Bytes that a cache keeps of entries, index and store, and that a step reads of them, in one layer."""

from __future__ import annotations

from typing import NamedTuple

from condense.methods import Method, Recall
from condense.state import num_entries


class CachedHeads(NamedTuple):
    """Heads as they are cached: how many, and the widths of their keys and values; latents have none of their own."""

    num: int
    width: int
    value_width: int

    @property
    def numbers(self) -> int:
        """Numbers in one token of all heads."""
        return self.num * (self.width + self.value_width)

    def entry_bytes(self, method: Method, itemsize: int) -> int:
        """Bytes of one entry of all heads."""
        form = method.layout.entry_format
        if form.bits == 16:
            return self.numbers * itemsize
        return self.num * (form.width(self.width, itemsize) + form.width(self.value_width, itemsize))

    def stored_bytes(self, method: Method, itemsize: int) -> int:
        """Bytes of one token of all heads in Recall's store."""
        if not isinstance(method, Recall) or method.store_bits == 16:
            return self.numbers * itemsize
        return self.num * method.store_format.width(self.width, self.value_width, itemsize)

    def bias_bytes(self, method: Method, length: int, itemsize: int) -> int:
        """Bytes of the matched biases of all entries, in float32 or wider; 0 if the method has none."""
        return int(num_entries(method, length)) * self.num * max(4, itemsize) if method.layout.matched else 0

    def index_bytes(self, method: Recall, length: int, itemsize: int) -> int:
        """Bytes of the index of all closed groups: codes of 4, 8 or 16 bits, and a grid in float32 or wider."""
        num_codes, num_grid = method.index_settings.widths(self.width)
        code_bytes = num_codes * (itemsize if method.index_bits == 16 else 1)
        return int(num_entries(method, length)) * self.num * (code_bytes + num_grid * max(4, itemsize))

    def recalled_bytes(self, method: Recall, length: int, itemsize: int) -> int:
        """Bytes that a step after ``length`` tokens reads: index, entries and their biases, open groups, the window."""
        groups = int(num_entries(method, length))
        unopened = groups - method.quota.at(groups)
        opened = (groups - unopened) * method.group_size
        entries = unopened * self.entry_bytes(method, itemsize) if method.unchosen == "pool" else 0
        window = (length - groups * method.group_size) * self.numbers * itemsize
        of_groups = self.index_bytes(method, length, itemsize) + opened * self.stored_bytes(method, itemsize)
        return entries + window + of_groups + self.bias_bytes(method, length, itemsize)
