"""Recall as a method: the same function whole, in chunks, on latents; and exact prompts."""

from functools import partial

import pytest
import torch
from grids import grid
from layers import columns, read, read_whole
from methods import test_parity as parity
from models import tiny
from oracles import cases, latent_oracle, oracle
from test_latent import read_in_steps
from two_sources import ArrayChoice

import condense
from condense import Recall
from condense.caches import CondensedLayer, StaticCondensedLayer
from condense.latent import UpProjection
from condense.ops import Source, attend_recall
from condense.ops.recall import GroupIndex, IndexChoice, RecallSources, choice

EXACT = {"rtol": 1e-12, "atol": 1e-12}
METHODS = cases.RECALLS
ROUNDED = {"rtol": 1e-10, "atol": 1e-10}
RECALLING, DENSE = Recall(group_size=4, window=8, num_recall=2), condense.Dense()
DENSE_FIRST = RECALLING.replace(prompt="exact")
CLOSE = {"rtol": 0, "atol": 1e-12}
LAYERS = [CondensedLayer, partial(StaticCondensedLayer, max_cache_len=90)]
# chunks, then single tokens
CALLS = [(0, 17), (17, 20), (20, 45), (45, 70), *((t, t + 1) for t in range(70, 90))]
NARROW = [(1, 8, (8, 8), 0.02), (3, 4, (8, 4), 0.3), (2, 4, (4, 12), 0.3), (5, 4, (4, 18), 0.3)]
REFUSED = [
    (RECALLING, {"backend": "triton"}, "backend"),
    (RECALLING, {"scale": -0.5}, r"scale must be > 0 for Recall, .*, got -0\.5"),
    (RECALLING.replace(store_bits=8), {}, "keeps no gradients of stored tokens: train with store_bits=16"),
    (DENSE_FIRST, {}, "train with prompt='recall'"),
    (DENSE_FIRST.replace(prompt="shared"), {}, "train with prompt='recall'"),
]


@grid(32, method=METHODS, steps=parity.RAGGED)
def test_any_chunks_and_padding_give_what_whole_rows_give(method, steps):
    lengths = [sum(counts) for counts in zip(*steps, strict=True)]
    data = parity.rows(lengths)
    outs = parity.read_in_steps(method, data, steps, "torch")[0]
    for out, (q, k, v), n in zip(outs, data, lengths, strict=True):
        if n:
            want = condense.attention(q, k, v, method=method, scale=parity.SCALE, backend="reference")[0]
            torch.testing.assert_close(out, want, **EXACT)


@pytest.mark.parametrize(("g", "bits", "widths", "error"), NARROW)
def test_narrow_values_are_not_taken_for_latents(g, bits, widths, error):
    """Pieces are rounded up, so that with and without such values they are of one size."""
    qkv = oracle.random_qkv(1, 2, 1, 40, *widths, dtype=torch.float32)
    method = Recall(group_size=g, window=2 * g, num_recall=1.0, store_bits=bits)
    got, want = (condense.attention(*qkv, method=x) for x in (method, DENSE))
    torch.testing.assert_close(got, want, rtol=0, atol=error)


@pytest.mark.parametrize("steps", [(41,), (7, 1, 13, 2, 1, 17)], ids=str)
@pytest.mark.parametrize("absorb", [True, False, None], ids=["absorbed", "expanded", "chosen"])
@pytest.mark.parametrize("name", ["two-open", "drop", "g6", "window0", "a-quarter"])
def test_latents_are_one_kv_head_however_they_are_read(name, absorb, steps):
    """By definition: absorbed queries on keys ``[c ; k_rope]`` and values c, with one choice for all heads."""
    x, d_c = latent_oracle.random(2, 3, 41, (5, 4, 6, 3)), 6
    up = UpProjection(x.w_uk, x.w_uv)
    entries, q = torch.cat([x.c, x.k_rope], -1)[:, None], up.absorb(torch.cat([x.q_nope, x.q_rope], -1))
    want = condense.attention(q, entries, entries[..., :d_c], method=METHODS[name], scale=9**-0.5, backend="reference")
    got, _ = read_in_steps(METHODS[name], x, steps, absorb=absorb)
    torch.testing.assert_close(got, up.project_out(want), **EXACT)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_stored_bits_are_those_of_the_open_groups(bits, backend):
    """An open group is read from the stored tokens; entries and window are those of the exact ones."""
    q, k, v = oracle.random_qkv(1, 4, 2, 34, 6, 4)
    method, exact = (Recall(group_size=4, window=5, num_recall=2, store_bits=n) for n in (bits, 16))
    context = read_whole(method, q, k, v, scale=0.7)
    *index, store = context.extra
    tokens = torch.cat(method.store_format.unpack(store, 6, 4, k.dtype, GroupIndex(*index)), dim=3)
    out = condense.attention(q, k, v, method=method, scale=0.7, backend=backend)
    want = exact.attend(q, context._replace(extra=(*index, tokens)), scale=0.7, backend=backend)[0]
    torch.testing.assert_close(out, want, **ROUNDED)
    assert not torch.equal(out, condense.attention(q, k, v, method=exact, scale=0.7, backend=backend))


def test_a_static_cache_without_room_for_a_group_is_read_in_pieces():
    method, (q, k, v) = METHODS["two-open"], oracle.random_qkv(1, 4, 2, 8, 6, 5)
    layer = StaticCondensedLayer(method, 8)
    outs = [read(layer, columns((q, k, v), *ends)) for ends in ((0, 3), (3, 8))]
    want = condense.attention(q, k, v, method=DENSE, scale=0.7)
    torch.testing.assert_close(torch.cat(outs, dim=2), want, **ROUNDED)


def test_a_prompt_on_latents_expands_each_token_once(expanded):
    inputs = latent_oracle.random(1, 2, 61, (8, 4, 16, 8), torch.float64)
    dense = condense.latent_attention(*inputs, method=DENSE)
    expanded.clear()
    torch.testing.assert_close(condense.latent_attention(*inputs, method=DENSE_FIRST), dense, **CLOSE)
    assert expanded == [61]


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("layer", LAYERS)
def test_chunks_are_dense_over_stored_tokens_and_steps_recall(layer, bits):
    """Also the first chunk, all of whose tokens the window still holds unquantised. Steps read Recall's own state."""
    method, qkv = DENSE_FIRST.replace(store_bits=bits), oracle.random_qkv(1, 4, 2, 90, 8, 8)
    dense, recalled = (condense.attention(*qkv, method=x, scale=0.3) for x in (method, method.replace(prompt="recall")))
    layer = layer(method)
    for start, stop in CALLS:
        got = read(layer, columns(qkv, start, stop), scale=0.3)
        want = recalled if stop == start + 1 else dense
        torch.testing.assert_close(got, want[:, :, start:stop], **CLOSE)


@pytest.mark.parametrize("layer", LAYERS)
def test_one_query_chooses_until_two_more_groups_have_closed(layer, monkeypatch):
    """But for the last of a call. A call may begin in between. The first of the two is open once it has closed. At
    least half as many are opened as by a query that chooses for itself, rounded up.
    """
    monkeypatch.setattr(choice, "OWN_CHOICES", 3)
    method = RECALLING.replace(prompt="shared", unchosen="drop", num_recall=0.1, min_recall=5)
    q, k, v = oracle.random_qkv(1, 4, 2, 90, 8, 8)
    context, asker, newer = read_whole(method, q, k, v, scale=0.3), list(range(90)), [-1] * 90
    layer = layer(method)
    for start, stop in CALLS:
        for t in range(start, stop - 3):
            closed = max(t + 1 - 8, 0) // 4
            asker[t], newer[t] = max(start, closed // 2 * 8 + 7) if t >= 7 else start, closed - 1 if closed % 2 else -1
    got = torch.cat([read(layer, columns((q, k, v), *ends), scale=0.3) for ends in CALLS], dim=2)
    *index, store = context.extra
    sources = RecallSources(Source(*store.split(8, dim=3)), context.window, context.spans)
    G, newer = store.shape[2] // 4, torch.tensor(newer)
    shares = torch.tensor([t < stop - 3 for start, stop in CALLS for t in range(start, stop)])
    closed = context.spans.at(0, 90, q.device)[0].hi - (newer >= 0).long()
    few, many = (
        IndexChoice(q[:, :, asker], GroupIndex(*index), 0.3, method.quota._replace(least=n)).at(0, 90, closed, G)
        for n in (3, 5)
    )
    mask = torch.where(shares[:, None], few, many) | (torch.arange(G) == newer[:, None])
    want, _ = attend_recall(q, sources, ArrayChoice(mask), scale=0.3, backend="torch")
    torch.testing.assert_close(got, want, **CLOSE)


def test_prompts_that_open_all_groups_are_read_as_dense_prompts(monkeypatch):
    """To the bit, and without a choice, while no more than half of the least number of groups have closed."""
    monkeypatch.setattr(choice, "OWN_CHOICES", 3)
    chosen, at = [], IndexChoice.at
    monkeypatch.setattr(IndexChoice, "at", lambda *args: chosen.append(args) or at(*args))
    shared = RECALLING.replace(prompt="shared", num_recall=0.1, min_recall=16, store_bits=4)
    for closed in (8, 12):
        qkv = oracle.random_qkv(1, 4, 2, 8 + 4 * closed, 8, 8)
        got, dense = (condense.attention(*qkv, method=shared.replace(prompt=prompt)) for prompt in ("shared", "exact"))
        assert torch.equal(got, dense) is (closed == 8)
        assert (chosen == []) is (closed == 8)


@pytest.mark.parametrize(("method", "options", "message"), REFUSED)
def test_what_it_cannot_do_is_refused(method, options, message):
    for learned in range(3):
        tensors = oracle.random_qkv(1, 2, 2, 40, 8, 8)
        tensors[learned].requires_grad_()
        tiny.refused(message, condense.attention, *tensors, method=method, **options)
