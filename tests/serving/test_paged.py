"""Attention over pages of numbers and of records: the outputs of whole sequences, however tokens come, and exactly
shared prefixes. Of latents too, absorbed and expanded. Requests that share a call have the results of each alone, in as
many operations.

Shapes: H query heads, K KV heads, L tokens, D and Dv widths; of latents d_n, d_r, d_c and d_v.
"""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import Counting, read
from models.tiny import refused
from paged_pool import METHODS, NULL, Pool, complete_a_prefix
from paged_sequences import cut, on_two_ranks, random_extras, random_latents, random_tokens, read_in_pieces, whole
from record_pool import EXACT_PROMPTS, RECALL, RECORDS, RecordPool
from torch.utils._python_dispatch import _disable_current_modes

import condense
from condense.caches import CondensedLayer
from condense.ops import Coarse
from condense.ops.paged import requests, rows
from condense.ops.recall import choice

H, K, D, DV = 4, 2, 6, 5
WIDTHS = (5, 2, 6, 4)
SCALE = 0.6
EXACT = {"rtol": 1e-12, "atol": 1e-12}
# pages of bytes hold what pages of numbers cannot: tokens in groups, entries in fewer bits, and biases of their own
IN_RECORDS = RECORDS | EXACT_PROMPTS | {"no-scores": METHODS["streaming-no-scores"]}
IN_RECORDS["last-4"] = METHODS["last"].replace(entry_bits=4)
IN_RECORDS["odd-window-matched"] = METHODS["last-odd-window"].replace(rep_bias="matched")
IN_RECORDS["streaming-matched-8"] = METHODS["streaming"].replace(rep_bias="matched", entry_bits=8)
# two codes of 4 bits share a byte, so values in records have an even width
POOLS = {name: partial(Pool, method, (K, D, DV)) for name, method in METHODS.items()} | {
    f"records-{name}": partial(RecordPool, method, (K, D, 4)) for name, method in IN_RECORDS.items()
}
LATENT = (1, WIDTHS[2] + WIDTHS[1], 0)
RECALL_LATENTS = [
    f"records-{name}"
    for name in ("default", "window-0", "window-5", "store-8", "store-4", "drop", "g-16", "all-open", "host-16")
]
LATENTS = {f"latents-{name}": partial(Pool, method, LATENT) for name, method in METHODS.items()} | {
    f"latents-{name}": partial(RecordPool, IN_RECORDS[name.removeprefix("records-")], LATENT) for name in RECALL_LATENTS
}
# pools whose requests share calls
NUMBERS = "last streaming-window-0 streaming streaming-1-query streaming-3-queries streaming-no-scores sinks window"
TOGETHER = [*NUMBERS.split(), *(f"records-{name}" for name in RECORDS | EXACT_PROMPTS)]
TOGETHER += ["records-last-4", "records-streaming-matched-8"]
VIEWS = (
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze",
    "transpose", "unbind", "unfold", "unsqueeze", "view", "_unsafe_view",
)  # fmt: skip
BACKENDS = pytest.mark.parametrize("backend", ["reference", "torch"])


@pytest.fixture(params=(POOLS | LATENTS).values(), ids=POOLS | LATENTS)
def pool(request):
    return request.param()


def tokens_of(pool, length, seed=0):
    if pool.value_width > 0:
        return random_tokens((H, K, D, pool.value_width), length, seed=seed)
    qkv, pool.up = random_latents(H, WIDTHS, length, seed=seed)
    return qkv


def wanted(pool, qkv, singles=()):
    return whole(qkv, pool.method, SCALE, singles, pool.up)


def two_with_a_prefix(pool, more):
    """The length of a prefix in whole pages, and two sequences that share it, with 30 and ``more`` tokens behind it."""
    prefix = pool.far * (1 + 64 // pool.far)
    first, other = tokens_of(pool, prefix + 30, 0), tokens_of(pool, prefix + more, 1)
    for mine, theirs in zip(other, first, strict=True):
        mine[:prefix] = theirs[:prefix]
    return prefix, first, other


@BACKENDS
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_equal_to_the_whole(pool, chunk, backend):
    qkv = tokens_of(pool, 150 if chunk > 1 else 90)
    out = read_in_pieces(pool, qkv, chunk, scale=SCALE, backend=backend)
    singles = range(len(out)) if chunk == 1 else ()
    torch.testing.assert_close(out, wanted(pool, qkv, singles), **EXACT)


@BACKENDS
@pytest.mark.parametrize("name", ["last", "streaming", "streaming-3-queries", *RECALL_LATENTS])
def test_heads_on_two_ranks_weigh_and_choose_groups_together(name, backend):
    qkv, up = random_latents(H, WIDTHS, 90)

    def make():
        pool = LATENTS[f"latents-{name}"]()
        pool.up = up
        return pool

    out = on_two_ranks(make, H, partial(read_in_pieces, qkv=qkv, piece=7, scale=SCALE, backend=backend))
    torch.testing.assert_close(out, wanted(make(), qkv), **EXACT)


@BACKENDS
@pytest.mark.parametrize("bits", [16, 4])
def test_choices_for_others_are_those_of_a_layer(bits, backend, monkeypatch):
    """Which queries choose depends on where calls begin and end. The two requests end alike, and begin apart."""
    monkeypatch.setattr(choice, "OWN_CHOICES", 3)
    method = RECALL.replace(prompt="shared", num_recall=0.1, min_recall=5, store_bits=bits)
    pool = RecordPool(method, (K, D, 4))
    qkv, requests, layers = tokens_of(pool, 90), [pool.add(90), pool.add(90)], [CondensedLayer(method) for _ in "ab"]
    for calls in ([None, (0, 10)], [(0, 40), (10, 40)], [(40, 60), (40, 61)], [(60, 61), (61, 90)], [(61, 90), None]):
        there = [x for x in zip(requests, layers, calls, strict=True) if x[2] is not None]
        outs = pool.read([(request, cut(qkv, *ends)) for request, _, ends in there], scale=SCALE, backend=backend)
        for got, (_, layer, ends) in zip(outs, there, strict=True):
            want = read(layer, [x.transpose(0, 1)[None] for x in cut(qkv, *ends)], scale=SCALE, backend=backend)[0]
            torch.testing.assert_close(got, want.transpose(0, 1), **EXACT)


@BACKENDS
def test_many_requests_at_different_lengths(pool, backend):
    rng = random.Random(1)
    qkvs = [tokens_of(pool, length, seed) for seed, length in enumerate((60, 9, 110, 1, 35))]
    requests = [pool.add(x[0].shape[0]) for x in qkvs]
    outs, singles = ([[] for _ in qkvs] for _ in range(2))
    while any(r.seen < r.length for r in requests):
        chunks = []
        for i, r in enumerate(requests):
            if r.seen < r.length and rng.random() < 0.8:
                stop = min(r.seen + rng.choice((1, 1, 5, 23)), r.length)
                chunks.append((i, (r, cut(qkvs[i], r.seen, stop))))
                singles[i] += [r.seen] * (stop == r.seen + 1)
        if isinstance(pool, RecordPool):  # single tokens come first
            chunks.sort(key=lambda x: x[1][1][0].shape[0] > 1)
        if chunks:
            read = pool.read([x for _, x in chunks], scale=SCALE, backend=backend)
            for (i, _), out in zip(chunks, read, strict=True):
                outs[i].append(out)
    for qkv, out, single in zip(qkvs, outs, singles, strict=True):
        torch.testing.assert_close(torch.cat(out), wanted(pool, qkv, single), **EXACT)


@BACKENDS
def test_a_shared_prefix_is_exact_and_never_written(pool, backend):
    prefix, first, other = two_with_a_prefix(pool, 50)
    a = pool.add(prefix + 30)
    # the prefix first, so that the window at its end is still held when the other request comes
    pool.read([(a, cut(first, 0, prefix))], scale=SCALE, backend=backend)
    b = pool.add(prefix + 50, a, prefix)
    shared = [page for page in {*b.window, *b.entries} if page != NULL]
    before = pool.blocks[shared].clone()
    pieces = [(b, cut(other, i, i + 5)) for i in range(prefix, prefix + 50, 5)]
    outs = [pool.read([piece], scale=SCALE, backend=backend)[0] for piece in pieces]
    torch.testing.assert_close(torch.cat(outs), wanted(pool, other)[prefix:], **EXACT)
    assert torch.equal(pool.blocks[shared], before)
    rest = pool.read([(a, cut(first, prefix, prefix + 30))], scale=SCALE, backend=backend)[0]
    torch.testing.assert_close(rest, wanted(pool, first)[prefix:], **EXACT)


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_prefixes_of_prefixes_that_are_written_in_the_same_step(name, order):
    """An engine hands out the pages of a prompt as soon as it is to be read, and may put who takes them first."""
    pool = POOLS[name]()
    prefix, first, other = two_with_a_prefix(pool, pool.far + 9)
    third = [torch.cat([x[: prefix + pool.far], y[-9:]]) for x, y in zip(other, first, strict=True)]
    requests = [pool.add(prefix + 30)]
    for i, shared in enumerate((prefix, prefix + pool.far)):
        requests[i].reserve(shared)
        requests.append(pool.add(shared + 9, requests[i], shared))
    chunks = [(r, cut(qkv, r.seen, len(qkv[0]))) for r, qkv in zip(requests, (first, other, third), strict=True)]
    outs = pool.read([chunks[i] for i in order], scale=SCALE)
    for i, out in zip(order, outs, strict=True):
        torch.testing.assert_close(out, wanted(pool, (first, other, third)[i])[requests[i].shared :], **EXACT)


@pytest.mark.parametrize("new", [1, 9])
@pytest.mark.parametrize("name", POOLS)
@BACKENDS
def test_a_prefix_that_a_single_token_completes_in_the_same_step(name, backend, new):
    complete_a_prefix(POOLS[name](), new, H, EXACT, scale=SCALE, backend=backend)


@pytest.mark.parametrize("name", ["streaming", "records-default", "records-drop"])
def test_single_tokens_expand_no_latents(name, expanded):
    """Prompts expand what they read once: entries, window and stored tokens."""
    pool = LATENTS[f"latents-{name}"]()
    request, qkv = pool.add(141), tokens_of(pool, 141)
    pool.read([(request, cut(qkv, 0, 140))], scale=SCALE)
    assert 140 < sum(expanded) <= 3 * 140
    expanded.clear()
    pool.read([(request, cut(qkv, 140, 141))], scale=SCALE)
    assert expanded == []


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("name", ["streaming", "sinks", *(f"records-{name}" for name in ("default", "drop", "exact"))])
@BACKENDS
def test_what_a_model_adds_to_attention(name, chunk, softcap, backend):
    """A logit without a value for each head, as GPT-OSS has them, and capped scores: of prompts and single tokens."""
    pool = POOLS[name]()
    pool.extras, qkv = random_extras(H, softcap=softcap), tokens_of(pool, 90)
    out = read_in_pieces(pool, qkv, chunk, scale=SCALE, backend=backend)
    singles = range(len(out)) if chunk == 1 else ()
    torch.testing.assert_close(out, whole(qkv, pool.method, SCALE, singles, extras=pool.extras), **EXACT)
    assert (out - wanted(pool, qkv, singles)).abs().max() > 0.1


def test_bfloat16_is_within_the_budget_of_the_whole():
    """Entries are rounded as in a contiguous cache: the same bits, so the same outputs."""
    method = condense.LCA(group_size=4, window=8, rep_bias="log_size")
    pool = Pool(method, (K, D, DV), dtype=torch.bfloat16)
    qkv = [x.bfloat16() for x in tokens_of(pool, 120)]
    got = read_in_pieces(pool, qkv, 40, scale=SCALE, backend="auto")
    rows = [x.transpose(0, 1)[None] for x in qkv]
    want = condense.attention(*rows, method=method, scale=SCALE, backend="torch")[0].transpose(0, 1)
    exact = whole([x.double() for x in qkv], method, SCALE)
    assert (got.double() - exact).abs().max() <= 2 * (want.double() - exact).abs().max()


def test_nothing_new_writes_nothing():
    pool = POOLS["streaming"]()
    empty, other = pool.add(3), pool.add(3)
    outs = pool.read([(empty, tokens_of(pool, 0)), (other, tokens_of(pool, 3))], scale=SCALE)
    assert outs[0].shape == (0, H, DV)
    assert outs[1].isfinite().all()
    assert empty.window == []


def test_an_unknown_backend_coarse_entries_and_a_ring_without_room_for_a_summary_are_refused():
    pool = RecordPool(METHODS["streaming"].replace(group_size=20, window=20, entry_bits=4), (K, D, 4))
    read = partial(pool.read, [(pool.add(3), tokens_of(pool, 3))], scale=SCALE)
    refused("backend must be", read, backend="paged")
    plan = pool.plan
    pool.plan = replace(plan, settings=replace(plan.settings, coarse=Coarse(2, 80)))
    refused("pages keep all entries, got Coarse", read)
    pool.plan = plan
    # its slots would be written twice at once, in any order on a GPU
    pool.kinds["ring"] = 8, pool.kinds["ring"][1]
    refused(r"the ring must have \d+ slots or more, got 8", read)


@pytest.fixture(params=TOGETHER)
def make_pool(request):
    return POOLS[request.param]


def read_pieces(make_pool, pieces, together):
    """Requests of such pieces and what they give: first pieces, then second ones, in one call or alone."""
    pool = make_pool()
    qkvs = [tokens_of(pool, sum(lengths), seed) for seed, lengths in enumerate(pieces)]
    requests, outs = [pool.add(sum(lengths)) for lengths in pieces], [[] for _ in pieces]
    for i in range(max(map(len, pieces))):
        left = [(n, requests[n], lengths[i]) for n, lengths in enumerate(pieces) if i < len(lengths)]
        chunks = [(n, (r, cut(qkvs[n], r.seen, r.seen + length))) for n, r, length in left]
        for some in [chunks] if together else [[chunk] for chunk in chunks]:
            for (n, _), out in zip(some, pool.read([x for _, x in some], scale=SCALE, backend="torch"), strict=True):
                outs[n].append(out)
    return pool, requests, [torch.cat(out) for out in outs]


def check_alone(make_pool, pieces):
    pool, mine, got = read_pieces(make_pool, pieces, together=True)
    other, theirs, want = read_pieces(make_pool, pieces, together=False)
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
    asked = [rows.Request(row, 0, num, num + before) for row, (num, before) in enumerate(lengths)]
    calls = rows.calls_of(asked)
    assert sorted(r for call in calls for r in call) == asked
    for call in calls:
        new, seen = [r.num for r in call], [r.seen for r in call]
        assert len(call) == 1 or len(call) * max(seen) <= rows.TOGETHER
        assert len(call) * max(new) - sum(new) <= sum(new) + rows._PADDING


def test_sums_take_a_pass_more_for_each_prefix_of_another_request_in_the_step():
    """Whole pages of 16 tokens behind where another one begins, not beyond what it reads."""
    pool, read = RecordPool(RECALL, (K, D, 4)), {1: [(48, 60), (0, 47)], 2: [(32, 40), (0, 40)], 4: [(0, 40), (64, 70)]}
    read[4] += [(48, 66), (32, 50)]
    for passes, ends in read.items():
        asked = [rows.Request(i, 0, seen - before, seen) for i, (before, seen) in enumerate(ends)]
        assert rows.num_passes(asked, pool.state([pool.add(1)]), pool.plan.settings) == passes


@pytest.mark.parametrize("prompt", ["recall", "exact"])
def test_operations_do_not_grow_with_requests(monkeypatch, prompt):
    """In every layer but the first, which finds out where things lie: 7 of a prompt when 14 are read together. Those of
    attention and views are not counted.
    """
    found, stock = [], requests.PagedLayer.read

    def uncounted(function, *args, **options):
        with _disable_current_modes():
            return function(*args, **options)

    def layers(*args, **options):
        stock(*args, **options)
        with Counting() as counting:
            stock(*args, **options)
        found.append(sum(name.split(".")[1] not in VIEWS for name in counting.names))

    for name in ("attend", "attend_recall"):
        monkeypatch.setattr(requests, name, partial(uncounted, getattr(requests, name)))
    monkeypatch.setattr(requests.PagedLayer, "read", layers)
    for num in (1, 2, 14):
        pool = RecordPool(RECALL.replace(store_bits=4, num_recall=0.25, prompt=prompt), (K, D, 4))
        asked = [pool.add(40 + i % 3) for i in range(num)]
        pool.read([(r, tokens_of(pool, r.length)) for r in asked], scale=SCALE, backend="torch")
    assert found[0] <= found[1] == found[2] <= 138, found
