"""Attention over pages of latents: the outputs of whole sequences, however tokens come, absorbed and expanded.

Shapes: H query heads, L tokens; widths d_n, d_r, d_c and d_v.
"""

from functools import partial

import pytest
import torch
from paged_pool import METHODS, NULL, Pool
from paged_sequences import cut, random_latents, read_in_pieces, whole_latents
from record_pool import RECORDS, RecordPool

from condense.ops.latents import UpProjection

H, WIDTHS, SCALE = 3, (5, 2, 6, 4), 0.6
EXACT = {"rtol": 1e-12, "atol": 1e-12}
LATENT = (1, WIDTHS[2] + WIDTHS[1], 0)
IN_RECORDS = ("default", "window-0", "store-8", "store-4", "entry-8-max", "drop", "all-open")
POOLS = {name: partial(Pool, method, LATENT) for name, method in METHODS.items()} | {
    f"records-{name}": partial(RecordPool, RECORDS[name], LATENT) for name in IN_RECORDS
}


@pytest.fixture(params=POOLS.values(), ids=POOLS)
def pool(request):
    return request.param()


def tokens_of(pool, length, seed=0):
    qkv, pool.up = random_latents(H, WIDTHS, length, seed=seed)
    return qkv


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_equal_to_the_whole(pool, chunk):
    qkv = tokens_of(pool, 150 if chunk > 1 else 90)
    out = read_in_pieces(pool, qkv, chunk, scale=SCALE, backend="torch")
    torch.testing.assert_close(out, whole_latents(qkv, pool.up, pool.method, SCALE), **EXACT)


@pytest.mark.parametrize("name", ["streaming", "4-bits-streaming", "records-store-4", "records-drop"])
def test_a_shared_prefix_is_exact_and_never_written(name):
    """Requests of different lengths, and one that takes up the pages of another's beginning, in shared calls."""
    pool = POOLS[name]()
    prefix = pool.far * (1 + 64 // pool.far)
    first, other, third = (tokens_of(pool, length, seed) for seed, length in enumerate((prefix + 30, prefix + 9, 70)))
    for mine, theirs in zip(other, first, strict=True):
        mine[:prefix] = theirs[:prefix]
    a, c = pool.add(prefix + 30), pool.add(70)
    pool.read([(a, cut(first, 0, prefix)), (c, cut(third, 0, 60))], scale=SCALE)
    b = pool.add(prefix + 9, a, prefix)
    shared = [page for page in {*b.window, *b.entries} if page != NULL]
    before = pool.blocks[shared].clone()
    outs = pool.read([(b, cut(other, prefix, prefix + 9)), (c, cut(third, 60, 70))], scale=SCALE)
    assert torch.equal(pool.blocks[shared], before)
    outs += pool.read([(a, cut(first, prefix, prefix + 30))], scale=SCALE)
    for out, qkv in zip(outs, (other, third, first), strict=True):
        want = whole_latents(qkv, pool.up, pool.method, SCALE)
        torch.testing.assert_close(out, want[-len(out) :], **EXACT)


@pytest.mark.parametrize("name", ["streaming", "records-default", "records-drop"])
def test_single_tokens_expand_nothing(name, monkeypatch):
    """Prompts expand what they read once: entries, window and stored tokens."""
    pool, expanded, expand = POOLS[name](), [], UpProjection.expand
    monkeypatch.setattr(UpProjection, "expand", lambda up, x: expanded.append(x.shape[2]) or expand(up, x))
    request, qkv = pool.add(141), tokens_of(pool, 141)
    pool.read([(request, cut(qkv, 0, 140))], scale=SCALE)
    assert 140 < sum(expanded) <= 3 * 140
    expanded.clear()
    pool.read([(request, cut(qkv, 140, 141))], scale=SCALE)
    assert expanded == []
