"""Requests that share a call: the results of each alone, in a number of operations that does not grow with them.

Shapes: H query heads, K KV heads, L tokens, D and Dv widths.
"""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import Counting
from paged_pool import METHODS, Pool
from paged_sequences import cut, random_tokens
from record_pool import EXACT_PROMPTS, RECALL, RECORDS, RecordPool
from torch.utils._python_dispatch import _disable_current_modes

import condense
from condense.ops.paged import requests, rows

H, K, D, DV = 4, 2, 8, 8
tokens_of = partial(random_tokens, (H, K, D, DV))
SCALE = 0.6
EXACT = {"rtol": 1e-12, "atol": 1e-12}
NAMES = "last streaming-window-0 streaming streaming-1-query streaming-3-queries streaming-no-scores sinks window"
NUMBERS = {name: METHODS[name] for name in NAMES.split()}
IN_RECORDS = RECORDS | EXACT_PROMPTS | {"last-4": NUMBERS["last"].replace(entry_bits=4)}
IN_RECORDS["matched-8"] = NUMBERS["streaming"].replace(rep_bias="matched", entry_bits=8)
POOLS = {name: partial(Pool, method) for name, method in NUMBERS.items()} | {
    f"records-{name}": partial(RecordPool, method) for name, method in IN_RECORDS.items()
}


@pytest.fixture(params=POOLS.values(), ids=POOLS)
def make_pool(request):
    return partial(request.param, (K, D, DV))


def read(make_pool, pieces, together):
    """Requests of such pieces and what they give: first pieces, then second ones, in one call or alone."""
    pool = make_pool()
    qkvs = [tokens_of(sum(lengths), seed=seed) for seed, lengths in enumerate(pieces)]
    requests, outs = [pool.add(sum(lengths)) for lengths in pieces], [[] for _ in pieces]
    for i in range(max(map(len, pieces))):
        left = [(n, requests[n], lengths[i]) for n, lengths in enumerate(pieces) if i < len(lengths)]
        chunks = [(n, (r, cut(qkvs[n], r.seen, r.seen + length))) for n, r, length in left]
        for some in [chunks] if together else [[chunk] for chunk in chunks]:
            for (n, _), out in zip(some, pool.read([x for _, x in some], scale=SCALE, backend="torch"), strict=True):
                outs[n].append(out)
    return pool, requests, [torch.cat(out) for out in outs]


def check_alone(make_pool, pieces):
    """Requests in one call give what each gives alone; records have the same bits."""
    pool, mine, got = read(make_pool, pieces, together=True)
    other, theirs, want = read(make_pool, pieces, together=False)
    torch.testing.assert_close(got, want, **EXACT)
    if isinstance(pool, RecordPool) and isinstance(pool.method, condense.Recall):
        for a, b in zip(mine, theirs, strict=True):
            assert all(torch.equal(x, other.kept(b)[name]) for name, x in pool.kept(a).items())


def boundaries(pool):
    """Lengths at which groups close, leave the window, and fill a page; and one less and one more."""
    g, w = pool.plan.settings.rule.chunk, pool.plan.settings.rule.window
    around = [n + d for n in (g, w, w + g, w + 2 * g, pool.far) for d in (-1, 0, 1)]
    return sorted({n for n in around if n > 0})


def test_later_pieces_at_every_boundary(make_pool):
    """Pieces of many lengths behind as many others, new requests and single tokens among them."""
    lengths = boundaries(make_pool())
    pieces = [(length, other, 3) for length, other in zip(lengths, reversed(lengths), strict=True)]
    check_alone(make_pool, [*pieces, (1, 1, 1), (2, 40), (70,)])


@pytest.mark.parametrize("bounds", [(0, 2**15), (2**12, 50), (0, 0)], ids=["alike", "few-tokens", "alone"])
def test_several_calls_in_a_step(make_pool, monkeypatch, bounds):
    monkeypatch.setattr(rows, "_PADDING", bounds[0])
    monkeypatch.setattr(rows, "TOGETHER", bounds[1])
    check_alone(make_pool, [(30, 5), (1, 20), (28, 28), (2, 1), (13,)])


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 70000)), min_size=1, max_size=40))
def test_calls_are_bounded(lengths):
    """Each request is read once; padding and the tokens of a call are within their bounds; what fits alone is alone."""
    asked = [rows.Request(row, 0, num, num + before) for row, (num, before) in enumerate(lengths)]
    calls = rows.calls_of(asked)
    assert sorted(r for call in calls for r in call) == asked
    for call in calls:
        new, seen = [r.num for r in call], [r.seen for r in call]
        assert len(call) == 1 or len(call) * max(seen) <= rows.TOGETHER
        assert len(call) * max(new) - sum(new) <= sum(new) + rows._PADDING


@pytest.mark.parametrize(
    ("read", "passes"),
    [
        ([(0, 40), (0, 9), (5, 30), (48, 60)], 1),
        # behind whole pages that the first fills; in the middle of one; not yet filled
        ([(32, 40), (0, 40)], 2),
        ([(33, 41), (0, 40)], 1),
        ([(48, 60), (0, 47)], 1),
        ([(0, 40), (64, 70), (48, 66), (32, 50)], 4),
    ],
    ids=str,
)
def test_passes_over_sums(read, passes):
    """One more for each prefix that a request may take up from another one in the same step; pages of 16 tokens."""
    asked = [rows.Request(i, 0, seen - before, seen) for i, (before, seen) in enumerate(read)]
    pool = RecordPool(RECALL, (K, D, DV))
    assert rows.num_passes(asked, pool.state([pool.add(1)]), pool.plan.settings) == passes


VIEWS = (
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze",
    "transpose", "unbind", "unfold", "unsqueeze", "view", "_unsafe_view",
)  # fmt: skip


@pytest.mark.parametrize("prompt", ["recall", "exact"])
def test_operations_do_not_grow_with_requests(monkeypatch, prompt):
    """In every layer but the first, which finds out where things lie: 7 of a prompt when 14 are read together."""
    method, counts = RECALL.replace(store_bits=4, num_recall=0.25, prompt=prompt), {}
    for num in (1, 2, 14):
        pool = RecordPool(method, (K, D, DV))
        asked = [pool.add(40 + i % 3) for i in range(num)]
        counts[num] = count_again(monkeypatch, [(r, tokens_of(r.length)) for r in asked], pool)
    assert counts[1] <= counts[2] == counts[14] <= 137, counts


def count_again(monkeypatch, chunks, pool):
    """The operations of the second layer of a step that are no views, those of attention left out."""
    found, original = [], requests.PagedLayer.read

    def uncounted(function, *args, **options):
        with _disable_current_modes():
            return function(*args, **options)

    def layers(*args, **options):
        original(*args, **options)
        with Counting() as counting:
            original(*args, **options)
        found.append(sum(name.split(".")[1] not in VIEWS for name in counting.names))

    with monkeypatch.context() as patch:
        for name in ("attend", "attend_recall"):
            patch.setattr(requests, name, partial(uncounted, getattr(requests, name)))
        patch.setattr(requests.PagedLayer, "read", layers)
        pool.read(chunks, scale=SCALE, backend="torch")
    return found[0]
