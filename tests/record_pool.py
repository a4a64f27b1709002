"""A pool of pages of records for tests: pages of window and records in the same blocks, as an engine packs them."""

import torch
from ops.test_packed_groups import Packed, check_packed
from paged_pool import NULL, Pool

import condense
from condense.ops.entries import EntryFormat
from condense.ops.step import record_format

RECALL = condense.Recall(group_size=4, window=8, num_recall=3, min_recall=2)
RECORDS = {
    "default": RECALL,
    "window-5": RECALL.replace(window=5),
    "window-4": RECALL.replace(window=4),
    "window-0": RECALL.replace(window=0, unchosen="drop"),
    "store-8": RECALL.replace(store_bits=8, num_recall=0.3),
    "store-4": RECALL.replace(store_bits=4),
    "drop": RECALL.replace(unchosen="drop", store_bits=4),
    "g-6": RECALL.replace(group_size=6, window=7),
    "g-16": RECALL.replace(group_size=16, window=20, num_recall=1e-9, min_recall=1),
    "g-32": RECALL.replace(group_size=32, window=32, num_recall=1e-9, min_recall=1, store_bits=8),
    "all-open": RECALL.replace(num_recall=1.0),
    "host-16": RECALL.replace(store="host"),
    "host-4": RECALL.replace(store_bits=4, store="host"),
    "host-8-drop": RECALL.replace(store_bits=8, unchosen="drop", store="host", group_size=8),
}
EXACT_PROMPTS = {
    "exact": RECALL.replace(prompt="exact"),
    "exact-8-window-4": RECALL.replace(prompt="exact", store_bits=8, window=4, num_recall=0.3),
    "exact-4-drop-window-5": RECALL.replace(prompt="exact", store_bits=4, window=5, unchosen="drop"),
}


class RecordPool(Pool):
    """Pages of one layer, each at some offset in its block: ``slots`` tokens of a window, or ``per_page`` records."""

    offsets, spare = {"window": 1024, "entries": 2048, "ring": 1024}, 4096

    def __init__(self, method, heads, *args, slots=8, per_page=4, **options):
        super().__init__(method, heads, *args, sizes=(per_page * method.group_size, slots), **options)

    def take_memory(self, *args):
        self.in_records, self.form = True, record_format(self.plan.settings, (self.width, self.value_width), self.dtype)
        self.kinds["entries"] = self.kinds["entries"][0], self.form.nbytes
        super().take_memory(*args)
        if self.form.apart:
            slots, shape = self.kinds["entries"][0], (len(self.blocks), self.kv_heads)
            host = torch.full((*shape, slots, self.form.nbytes_apart), self.fill, dtype=torch.uint8)
            self.host = host.pin_memory() if self.blocks.is_cuda else host

    def kept(self, request):
        """The parts of the records of a request's complete groups, by name: ``[1, K, G, columns]``, or of tokens."""
        g = self.method.group_size
        slots = slice(self.plan.settings.summary_delay // g, request.seen // g)
        pages = torch.tensor(request.entries, device=self.blocks.device)
        views = self.form.views(self.view("entries")[pages], None if self.host is None else self.host[pages.cpu()])
        kept = {name: x.transpose(0, 1).flatten(1, 2)[None, :, slots] for name, x in views.items()}
        return {
            part.name: kept[part.name].unflatten(3, part.shape).flatten(2, -2)
            for part in sum(self.form.parts, ())
            if part.name != "stamps"
        }


def check_same(got, want):
    """Rows of outputs ``[..., Dv]``: all alike on a CPU; on a GPU but for the few whose choice had a near tie."""
    eps = torch.finfo(got.dtype).eps
    near = ((got - want).abs() <= max(2e-5, 4 * eps) * (1 + want.abs())).all(-1)
    assert float(near.double().mean()) >= (0.98 if got.is_cuda else 1)


def check_entries(pool, got, want, name):
    """Rows of bytes of entries: sums in another order change a grid's last digits, and may round to the next code."""
    form, width = EntryFormat(pool.method.entry_bits), pool.width if name == "entries_k" else pool.value_width
    got, want = (form.unpack(x, width, pool.dtype).double() for x in (got, want))
    spread = want.amax(-1, keepdim=True) - want.amin(-1, keepdim=True)
    apart, eps = (got - want).abs(), torch.finfo(pool.dtype).eps
    assert bool((apart <= 1.1 * spread / (2**form.bits - 1) + 4 * eps * (1 + want.abs())).all())
    assert int((apart > 16 * eps * (1 + want.abs())).sum()) <= want.numel() / 100


def check_records(pools):
    """Both pools hold the same, entries but for a rounding; index and store pass `check_packed`."""
    mine, theirs = pools
    eps = torch.finfo(mine.dtype).eps
    mine_window, their_window = (pool.view("window").view(pool.dtype) for pool in pools)
    for a, b in zip(mine.requests, theirs.requests, strict=True):
        assert torch.equal(mine_window[a.window[-1]].nan_to_num(7), their_window[b.window[-1]].nan_to_num(7))
        kept, wanted = mine.kept(a), theirs.kept(b)
        if mine.plan.settings.choice is not None and a.seen >= mine.method.group_size:
            complete = a.seen // mine.method.group_size * mine.method.group_size
            k, v = (torch.cat(x)[:complete].transpose(0, 1)[None] for x in list(zip(*a.tokens, strict=True))[1:])
            check_packed(Packed.of_parts(kept), Packed.of_parts(wanted), k, v, mine.method.store_bits)
        for name, x in wanted.items():
            if name in ("signs", "steps", "store"):
                continue
            if x.dtype != torch.uint8:
                atol = 2e-5 if name == "biases" else 1e-6  # a bias is a product of D numbers in float32
                torch.testing.assert_close(kept[name], x, rtol=max(1e-6, eps), atol=atol, msg=name)
            elif name.startswith("entries"):
                check_entries(mine, kept[name], x, name)
            else:
                assert torch.equal(kept[name], x), name
    assert bool((mine.blocks[NULL] == mine.fill).all())
