"""A pool of pages for tests, as an engine has it: shuffled pages, window pages taken back, NaN in all the rest.

Shapes: R requests, T new tokens, H query heads, K KV heads, D and Dv widths, P pages, N slots of a page.
"""

import itertools
import random

import torch
from oracles import oracle
from paged_sequences import whole

import condense
from condense.ops import NO_EXTRAS
from condense.ops.latents import UpProjection
from condense.ops.paged import NewTokens, PagedState, Pages, read_paged
from condense.serving.blocks import ServedLayer, page_sizes
from condense.serving.plan import serving_plan

NULL = 0  # a page that belongs to no request
METHODS = {
    "last": condense.CCA(group_size=4, window=8),
    "last-odd-window": condense.CCA(group_size=4, window=5, rep_bias="log_size"),
    "last-window-0": condense.CCA(group_size=5, window=0),
    "g-2": condense.CCA(group_size=2, window=3),
    "streaming": condense.LCA(group_size=4, window=8, rep_bias="log_size"),
    "streaming-window-0": condense.LCA(group_size=3, window=0),
    "streaming-1-query": condense.LCA(group_size=4, window=12, num_summary_queries=1),
    "streaming-3-queries": condense.CCA(group_size=4, window=4, summary="streaming", num_summary_queries=3),
    "streaming-no-scores": condense.LCA(group_size=4, window=8, key_pooling="mean", value_pooling="max"),
    "larger-group-than-page": condense.LCA(group_size=20, window=40),
    "4-bits": condense.CCA(group_size=4, window=8, rep_bias="log_size", entry_bits=4),
    "4-bits-streaming": condense.LCA(group_size=4, window=8, entry_bits=4),
    "8-bits-no-scores": condense.LCA(group_size=4, window=7, key_pooling="mean", value_pooling="max", entry_bits=8),
    "matched": condense.CCA(group_size=4, window=8, rep_bias="matched"),
    "matched-8-bits-streaming": condense.LCA(group_size=4, window=8, rep_bias="matched", entry_bits=8),
    "sinks": condense.StreamingLLM(sink=5, window=20),
    "window": condense.StreamingLLM(sink=0, window=9),
}


class Pool:
    """Pages of one layer in blocks of bytes, each given to one request and one kind; what no request has written is 255
    in every byte: NaN as a number. up, ranks: of latents; heads: those of this process. extras: of the layer. host:
    pages of stored tokens in host memory. slots: copies of these, for steps of kernels.
    """

    up, ranks, heads, extras, host, slots = None, None, slice(None), NO_EXTRAS, None, None
    # where in its block a page of each kind begins, and bytes of a block more than pages need: they need no neighbours
    offsets, spare = {"window": 0, "entries": 0, "ring": 0}, 64

    def __init__(
        self, method, heads, num_pages=400, dtype=torch.float64, device="cpu", seed=0, *, sizes=None, block=None,
        fill=255,
    ):  # fmt: skip
        """sizes: tokens of a page; block: bytes from page to page; fill: every byte that no request has written."""
        self.method, self.plan, self.dtype, self.fill = method, serving_plan(method), dtype, fill
        self.kv_heads, self.width, self.value_width = heads
        self.in_records = self.plan.has_records
        layer = ServedLayer(self.plan, self.kv_heads, heads[1:], dtype)
        self.far, self.near = sizes or page_sizes([layer])
        # slots of a page and bytes of a slot
        self.kinds = {
            "window": (self.near, layer.window_bytes),
            "entries": (self.plan.entry_slots(self.far), layer.slot_bytes),
            "ring": (self.plan.ring_slots, self.width * dtype.itemsize),
        }
        self.take_memory(num_pages, block, device)
        self.free = list(range(1, num_pages))
        random.Random(seed).shuffle(self.free)
        self.requests = []

    def take_memory(self, num_pages, block, device):
        largest = max(slots * self.kv_heads * nbytes for slots, nbytes in self.kinds.values())
        # where blocks lie far apart, memory between pages is never touched, and so not taken
        size = block or -(-largest // 16) * 16 + self.spare
        self.blocks = torch.empty(num_pages, size, dtype=torch.uint8, device=device)
        for part in [self.view(kind) for kind in self.kinds] if block else [self.blocks]:
            part.fill_(self.fill)

    def add(self, length, shared=None, shared_tokens=0):
        request = Request(self, length)
        if shared is not None:
            request.share(shared, shared_tokens)
        self.requests.append(request)
        return request

    def take(self):
        return self.free.pop()

    def give_back(self, page):
        for kind in self.kinds:
            self.view(kind)[page] = self.fill
        if self.host is not None:
            self.settle()
            self.host[page] = self.fill
        self.free.append(page)

    def settle(self):
        """Wait for kernels, which read and write host memory too."""
        if self.blocks.is_cuda:
            torch.cuda.synchronize()

    def view(self, kind):
        """All blocks as pages of one kind, bytes ``[P, K, N, nbytes]``."""
        slots, nbytes = self.kinds[kind]
        strides = (self.blocks.stride(0), slots * nbytes, nbytes, 1)
        return self.blocks.as_strided((len(self.blocks), self.kv_heads, slots, nbytes), strides, self.offsets[kind])

    def table(self, tables):
        # as in an engine, whose table is as wide for many steps: kernels are compiled for its strides
        width = -(-max(map(len, tables)) // 16) * 16
        rows = [table + [NULL] * (width - len(table)) for table in tables]
        return torch.tensor(rows, dtype=torch.int32, device=self.blocks.device)

    def state(self, requests):
        tables = (self.table([getattr(request, kind) for request in requests]) for kind in self.kinds)
        window, entries, ring = map(Pages, map(self.view, self.kinds), tables)
        if not self.in_records:
            entries = entries.view(self.dtype)
        ring = ring.view(self.dtype) if self.plan.ring_slots else None
        others = {name: getattr(self, name) for name in ("ranks", "extras", "slots")}
        others["up"] = self.up and UpProjection(*(w[self.heads] for w in self.up))
        return PagedState(window.view(self.dtype), entries, ring, store=self.host, **others)

    def read(self, chunks, **options):
        """Reads ``[(request, qkv of its new tokens [., heads, width])]`` in one step; outputs, one per request."""
        requests, lengths = [request for request, _ in chunks], [qkv[0].shape[0] for _, qkv in chunks]
        for (request, qkv), length in zip(chunks, lengths, strict=True):
            request.prepare(length)
            request.tokens.append(qkv)
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        seen = [request.seen + length for request, length in zip(requests, lengths, strict=True)]
        steps = len(list(itertools.takewhile(lambda length: length <= 1, lengths)))
        device = self.blocks.device
        new = NewTokens(starts, seen, torch.tensor(seen, dtype=torch.int32, device=device), steps)
        q, k, v = (torch.cat([qkv[i] for _, qkv in chunks]).to(device) for i in range(3))
        q = q[:, self.heads]
        width = v.shape[2] if self.up is None else self.up.w_uv.shape[2]
        out = torch.full((*q.shape[:2], width), float("nan"), dtype=q.dtype, device=device)
        read_paged((q, k, v), self.state(requests), new, self.plan.settings, out=out, **options)
        for request, n in zip(requests, seen, strict=True):
            request.seen = n
        return list(out.split(lengths))


class Request:
    """The pages of one request, by kind; how many tokens it has read, and q, k and v of those that it read itself."""

    def __init__(self, pool, length):
        self.pool, self.seen, self.length = pool, 0, length
        self.window, self.entries, self.shared, self.tokens = [], [], 0, []
        self.ring = [pool.take()] if pool.plan.ring_slots else []

    def share(self, other, tokens):
        assert tokens % self.pool.far == 0
        self.seen, self.shared = tokens, tokens
        self.entries = other.entries[: tokens // self.pool.far]
        self.window = other.window[: tokens // self.pool.near]

    def reserve(self, stop):
        while len(self.window) * self.pool.near < stop:
            self.window.append(self.pool.take())
        while len(self.entries) * self.pool.far < stop:
            self.entries.append(self.pool.take())

    def prepare(self, num_new):
        """Gives back window pages that no later token needs, then takes pages for the new tokens."""
        near, stop = self.pool.near, self.seen + num_new
        for i in range(self.shared // near, max(0, self.seen - self.pool.plan.kept_tokens + 1) // near):
            if self.window[i] != NULL:
                self.pool.give_back(self.window[i])
                self.window[i] = NULL
        self.reserve(stop)


def complete_a_prefix(pool, num_new, heads, tolerance, *, scale, backend):
    """A request completes a prefix by a single token; in the same step another goes on with ``num_new`` tokens."""
    prefix = pool.far * (1 + 64 // pool.far)
    sizes = (heads, pool.kv_heads, prefix + num_new, pool.width, pool.value_width)
    qkv = [x[0].transpose(0, 1).to(pool.blocks.device, pool.dtype) for x in oracle.random_qkv(1, *sizes)]
    a = pool.add(prefix)
    pool.read([(a, [x[: prefix - 1] for x in qkv])], scale=scale, backend="torch")
    a.reserve(prefix)
    b = pool.add(prefix + num_new, a, prefix)
    chunks = [(a, [x[prefix - 1 : prefix] for x in qkv]), (b, [x[prefix:] for x in qkv])]
    got = torch.cat(pool.read(chunks, scale=scale, backend=backend))
    singles = range(prefix - 1, prefix + (num_new == 1))
    want = whole([x.double().cpu() for x in qkv], pool.method, scale, singles)
    torch.testing.assert_close(got.double().cpu(), want[prefix - 1 :], **tolerance)


def leave_a_place_empty(pool, tokens):
    """As a recorded graph has one: nothing is written, though its tables name pages; the output is 0."""
    last, scale = len(tokens[0]) - 1, 0.1
    a, b = pool.add(last + 1), pool.add(1)
    pool.read([(a, [x[:last] for x in tokens])], scale=scale, backend="torch")
    a.prepare(1)
    b.window, b.entries, b.ring = [pool.take()], a.entries, a.ring
    # some numbers among them, because the interpreter complains about the largest of none
    some = torch.tensor([0, 1], device=pool.blocks.device)
    nobody = [torch.full_like(x[:1], torch.nan).index_fill(2, some, 1.0) for x in tokens]
    q, k, v = (torch.cat([x, y[last:]]) for x, y in zip(nobody, tokens, strict=True))
    out, seen = torch.full_like(q, torch.nan), torch.tensor([0, last + 1], dtype=torch.int32, device=q.device)
    before, new = pool.blocks.clone(), NewTokens([0, 1, 2], [0, last + 1], seen, 2)
    read_paged((q, k, v), pool.state([b, a]), new, pool.plan.settings, scale=scale, out=out, backend="triton")
    assert bool((out[0] == 0).all())
    assert bool(out[1].isfinite().all())
    changed = (pool.blocks != before).any(1).nonzero().flatten().tolist()
    assert set(changed) <= {a.window[last // pool.near], a.entries[last // pool.far], *a.ring}
