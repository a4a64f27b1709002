"""The entries, tokens and groups that a method keeps or reads at a length, counted and in bytes."""

from typing import NamedTuple, TypeGuard

import torch

from condense.methods import DGA, Method, step_settings
from condense.ops import Chunks, UniformRule
from condense.ops.recall import Quota
from condense.ops.step import Per, entry_names, fields_of
from condense.state import SLACK, fine_slots, first_entries, first_needed, kept_sums, num_entries

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def chooses_from_prompt(method: Method) -> TypeGuard[DGA]:
    """True for DGA that chooses a whole prompt's focal tokens."""
    return isinstance(method, DGA) and method.selection == "prompt"


def sum_closed(rule: UniformRule, length: int, most: int | None) -> int:
    """Number of closed chunks, at most ``most`` (None: all), summed over the queries of a text of ``length`` tokens."""
    if rule.window is None or length <= rule.window:
        return 0
    behind = length - rule.window  # tokens behind the window of the last query; the query before has one less
    counted = behind if most is None else min(behind, most * rule.chunk - 1)
    full, rest = divmod(counted + 1, rule.chunk)
    return rule.chunk * full * (full - 1) // 2 + rest * full + (behind - counted) * (most or 0)


def sum_opened(rule: UniformRule, quota: Quota, length: int) -> int:
    """Number of open groups, summed over the queries of a text of ``length`` tokens."""
    if quota.part == quota.of:
        return sum_closed(rule, length, quota.most)
    full, rest = divmod(max(0, length - (rule.window or 0)), rule.chunk)
    # a quota by share has no ``most``; from ``first`` closed groups on, the share is larger than ``least``
    first = quota.least * quota.of // quota.part + 1
    opened = sum_closed(rule, length, quota.least)
    if full < first:
        return opened
    shares = sum(sign * _floor_sum(n, quota.part, quota.of - 1, quota.of) for sign, n in ((1, full), (-1, first)))
    above = shares - (full - first) * quota.least
    return opened + rule.chunk * above + (rest + 1) * (quota.at(full) - quota.least)


def _floor_sum(count: int, step: int, start: int, of: int) -> int:
    """``(start + i * step) // of`` summed over i below ``count``, by Euclid's algorithm: for counts of any size."""
    total = 0
    while count:
        total += count * (count - 1) // 2 * (step // of) + count * (start // of)
        step, start = step % of, start % of
        last = step * count + start
        count, start, step, of = last // of, last % of, of, step
    return total


def tokens_left(method: Method, length: int) -> int:
    """Tokens of a prompt of ``length`` that a method keeps or pools, as a mean over the layers."""
    return length if method.reread is None else method.reread.num_kept(length)


def kept(method: Method, length: int) -> dict[Per, int]:
    """Number of rows in a cache's buffers after ``length`` tokens, per KV head, for each thing a row stands for."""
    if method.reads_prompt:
        return {Per.ENTRY: int(first_entries(method, length))}
    length = tokens_left(method, length)
    layout, groups = method.layout, int(num_entries(method, length))
    tail = min(length, layout.num_summary - 1 + SLACK) if layout.num_summary > 1 else 0
    exact = min(length, length - int(first_needed(method, length - SLACK)))
    counts = {Per.ENTRY: groups, Per.TOKEN: exact, Per.QUERY: tail, Per.FINE: fine_slots(method)}
    if layout.choice is not None:
        g, slots = layout.rule.chunk, min(layout.choice.store.slots, groups)
        counts |= {Per.STORED: groups * g, Per.COPIED: slots * g, Per.SLOT: slots, Per.SUM: kept_sums(g)}
    return counts


def kept_on_device(method: Method, length: int) -> int:
    """Entries and exact tokens that a cache keeps on the device, per KV head."""
    counts, choice = kept(method, length), method.layout.choice
    per = {Per.ENTRY, Per.FINE, Per.TOKEN, Per.STORED, Per.COPIED}
    if choice is not None:
        # with Recall an ENTRY row is a group's index, which is no entry; a store on the host is not on the device
        per -= {Per.ENTRY, Per.STORED} if choice.store.on_host else {Per.ENTRY}
    return sum(counts.get(each, 0) for each in per)


class CachedHeads(NamedTuple):
    """Cached heads: their number, and widths of keys and values; for latents value_width is 0."""

    num: int
    width: int
    value_width: int

    def row_bytes(self, method: Method, itemsize: int) -> dict[tuple[str, Per], int]:
        """Bytes of one row of each buffer, over all heads; keys are the buffer's name and what a row stands for.

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
        return held[False] + self._own_bytes(method, length, itemsize), held[True]

    def _own_bytes(self, method: Method, length: int, itemsize: int) -> int:
        """Bytes of what a method's `represent` returns besides its entries, measured on a chunk of zeros."""
        layout, settings = method.layout, step_settings(method)
        tokens = tokens_left(method, length)
        chunks = 0 if method.reads_prompt else int(num_entries(method, tokens)) // layout.rule.entries
        if layout.pooling is not None or layout.choice is not None or chunks == 0:
            return 0
        g, dtype = layout.rule.chunk, DTYPES[itemsize]
        k, v = (torch.zeros(1, self.num, g, width, dtype=dtype) for width in (self.width, self.value_width))
        summary = torch.zeros(1, self.num, 1, self.width) if layout.num_summary > 0 else None
        made = method.represent(Chunks(k, v, 0, 1, g, 0), summary, scale=1.0, backend="torch")
        return chunks * sum(x.nbytes for x in made[len(entry_names(settings)) :])

    def step_bytes(self, method: Method, length: int, itemsize: int) -> int:
        """Bytes that a step after ``length`` tokens reads: index or entries, open groups, one sum of values, window."""
        length = tokens_left(method, length)
        choice, groups, g = method.layout.choice, int(num_entries(method, length)), method.layout.rule.chunk
        opened = 0 if choice is None else choice.quota.at(groups)
        counts = dict.fromkeys(("signs", "steps", "biases"), groups) | {"store": opened * g, "sums": 1}
        counts |= dict.fromkeys(("entries_k", "entries_v"), groups)
        counts |= dict.fromkeys(("ring_k", "ring_v"), length - groups * g)
        return sum(counts.get(name, 0) * nbytes for (name, _), nbytes in self.row_bytes(method, itemsize).items())
