"""Entries on two scales: one definition in every backend, cache and order of reading, and real memory saved."""

import pytest
import torch
from grids import fixture_of
from models import test_laws as laws
from models import tiny
from oracles import oracle
from two_scales import METHODS, TwoScales, by_hand

import condense
from condense.models.inspect import inspect
from condense.state import SLACK

method = fixture_of(METHODS)
PADS, LENGTH = (0, 8), 113


def test_attention(backend, method):
    q, k, v = oracle.random_qkv(2, 4, 2, LENGTH, 3, 4)
    options = {"method": method, "backend": backend, "padding": torch.tensor(PADS), "return_lse": True}
    got = condense.attention(q, k, v, **options)
    for b, pads in enumerate(PADS):
        for h in range(2):
            heads = slice(2 * h, 2 * h + 2)
            want = by_hand(method, q[b, heads, pads:], k[b, h, pads:], v[b, h, pads:], 3**-0.5)
            torch.testing.assert_close([x[b, heads, pads:] for x in got], [*want], rtol=1e-12, atol=1e-12)


def test_no_token_sees_a_later_one_and_packed_documents_are_apart(method):
    q, k, v = oracle.random_qkv(1, 2, 1, 90, 3, 4)
    whole = condense.attention(q, k, v, method=method, cu_seqlens=torch.tensor([0, 50, 50, 90]))
    apart = [condense.attention(*(x[:, :, i:j] for x in (q, k, v)), method=method) for i, j in ((0, 50), (50, 90))]
    assert whole.equal(torch.cat(apart, dim=2))
    changed = torch.cat([k[:, :, :70], k[:, :, 70:] + 1], dim=2)
    assert torch.equal(*(condense.attention(q, x, v, method=method)[:, :, :70] for x in (k, changed)))


def test_gradients():
    inputs = [x.requires_grad_() for x in oracle.random_qkv(1, 2, 1, 21, 2, 2)]
    method = TwoScales(window=2, chunk=2, n=2, near=6)
    assert torch.autograd.gradcheck(lambda *qkv: condense.attention(*qkv, method=method), inputs)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_models_keep_their_laws(kind, method):
    model = condense.apply(tiny.model(kind, num_hidden_layers=2), method)
    laws.test_full_forward_chunks_and_steps_agree(model)
    laws.test_each_row_of_a_padded_batch_gets_its_own_tokens(model, 1, "static")
    laws.test_prompt_lookup_takes_tokens_back(model, 3)
    for mode in ("greedy", "three-beams"):
        laws.test_static_and_growing_caches_give_the_tokens_of_none(model, laws.MODES[mode])


def test_a_static_cache_that_is_too_short_for_coarse_entries(method):
    model, ids = condense.apply(tiny.model("llama", num_hidden_layers=1), method), tiny.tokens(1, 4)
    growing = tiny.generate(model, ids, max_new_tokens=3)
    assert growing.equal(tiny.generate(model, ids, max_new_tokens=3, cache_implementation="static"))


def test_tokens_are_taken_back_as_far_as_is_said(method):
    model, ids = condense.apply(tiny.model("llama", num_hidden_layers=1), method), tiny.tokens(1, 140)
    whole = tiny.logits(model, ids)
    for length in range(80, 110, 3):
        cache = tiny.filled(model, ids[:, :length])
        cache.crop(-SLACK)
        rest = model(ids[:, length - SLACK :], past_key_values=cache).logits
        torch.testing.assert_close(rest, whole[:, length - SLACK :], **tiny.EXACT)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_the_cache_is_as_small_as_its_entries(implementation):
    """At 16,384 tokens: groups of 4 behind a window of 512, of 64 behind 2,048."""
    method = TwoScales(window=512, delay=512, n=16, near=2048)
    model = condense.apply(tiny.model("llama", num_hidden_layers=1, max_position_embeddings=2**14), method)
    ids = tiny.tokens(1, 2**14 - 1)
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "cache_implementation": implementation}
    cache = model.generate(ids, do_sample=False, disable_compile=True, **options).past_key_values
    rows = (2**14 - 2048) // 64 + (2048 - 512) // 4 + 512
    row = 2 * 2 * 8 * 8  # two KV heads, keys and values of 8 float64
    assert condense.cache_nbytes(cache) <= 1.05 * rows * row
    (report,) = inspect(model, method, 2**14, 8)
    assert rows * row <= report.bytes <= 1.05 * rows * row
