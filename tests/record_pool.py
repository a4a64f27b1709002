"""A pool of pages of records for tests: pages of window and records in the same blocks, as an engine packs them.

Blocks lie far apart, tables are shuffled, and every byte that no request has written is 255: NaN as a number.
"""

import dataclasses
import random
from types import SimpleNamespace

import torch
from paged_pool import Pool

from condense.methods import step_settings
from condense.ops.paged import Pages
from condense.ops.step import record_format


def paged_settings(method):
    """The settings of a method of records: these are made when their groups are complete."""
    return dataclasses.replace(step_settings(method), summary_delay=0)


class RecordPool(Pool):
    """Pages of one layer: N tokens of a window, or the records of F tokens, at some offset in each block."""

    def __init__(self, method, heads, num_pages=400, dtype=torch.float64, device="cpu", seed=0, slots=8, per_page=4):
        self.method, (K, D, Dv) = method, heads
        self.kv_heads, self.width, self.value_width = heads
        settings, g = paged_settings(method), method.group_size
        self.plan = SimpleNamespace(
            settings=settings, slots=slots, tokens_per_page=per_page * g, kept_tokens=method.window + g, has_ring=False
        )
        self.form = record_format(settings, (D, Dv), dtype)
        row, record = (D + Dv) * dtype.itemsize, self.form.nbytes
        self.block = -(-max(K * slots * row, K * per_page * record) // 16) * 16 + 4096
        self.bytes = torch.full((num_pages * self.block,), 255, dtype=torch.uint8, device=device)
        self.cache = self._pages((K, slots, row), 1024).view(dtype)
        self.records = self._pages((K, per_page, record), 2048)
        self.free = list(range(1, num_pages))
        random.Random(seed).shuffle(self.free)
        self.requests = []

    def _pages(self, shape, offset):
        K, N, C = shape
        pages = len(self.bytes) // self.block
        return self.bytes.as_strided((pages, K, N, C), (self.block, N * C, C, 1), offset)

    def give_back(self, page):
        self.bytes[page * self.block : (page + 1) * self.block] = 255
        self.free.append(page)

    def state(self, requests):
        state = super().state(requests)
        return state._replace(entries=Pages(self.records, state.entries.table))
