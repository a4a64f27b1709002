"""`Recall(prompt="exact")`: calls of several tokens are dense attention, single tokens recall."""

from functools import partial

import pytest
import torch
from models import tiny
from oracles import latent_oracle, oracle

import condense
from condense.caches import CondensedLayer, StaticCondensedLayer
from condense.caches.request import read_request
from condense.latent import UpProjection
from condense.models.inspect import inspect

RECALL = condense.Recall(group_size=4, window=8, num_recall=2)
EXACT = RECALL.replace(prompt="exact")
DENSE = condense.Dense()
CLOSE = {"rtol": 0, "atol": 1e-12}


@pytest.mark.parametrize("padding", [None, torch.tensor([0, 7])], ids=["whole", "padded"])
@pytest.mark.parametrize("L", [2, 8, 12, 61])
def test_a_prompt_is_dense_attention(L, padding):
    padding = None if padding is None else padding.clamp(max=L - 1)
    q, k, v = oracle.random_qkv(2, 6, 2, L, 8, 6)
    for backend in ("reference", "torch"):
        got, got_lse = condense.attention(q, k, v, method=EXACT, padding=padding, backend=backend, return_lse=True)
        want, lse = condense.attention(q, k, v, method=DENSE, padding=padding, return_lse=True)
        torch.testing.assert_close(got, want, **CLOSE)
        torch.testing.assert_close(got_lse, lse, **CLOSE)


def test_a_prompt_on_latents_expands_each_token_once(monkeypatch):
    """The window holds all of them; the store has those of closed groups a second time."""
    columns, expand = [], UpProjection.expand
    monkeypatch.setattr(UpProjection, "expand", lambda up, c: columns.append(c.shape[2]) or expand(up, c))
    inputs = latent_oracle.random(1, 2, 61, (8, 4, 16, 8), torch.float64)
    dense = condense.latent_attention(*inputs, method=DENSE)
    columns.clear()
    torch.testing.assert_close(condense.latent_attention(*inputs, method=EXACT), dense, **CLOSE)
    # entries of groups, tokens
    assert columns == [(61 - EXACT.window) // EXACT.group_size, 61]


def _attend(layer, method, q, k, v, start, stop):
    q, k, v = (x[:, :, start:stop] for x in (q, k, v))
    context = layer.read(k, v, read_request(q, scale=0.3))
    return method.attend(q, context, scale=0.3)[0]


def test_chunks_are_dense_and_steps_recall():
    """The state is Recall's, whatever read the prompt, so the steps after it are its own."""
    q, k, v = oracle.random_qkv(1, 4, 2, 70, 8, 8)
    dense, whole = (condense.attention(q, k, v, method=method, scale=0.3) for method in (DENSE, RECALL))
    layer = CondensedLayer(EXACT)
    for start, stop in ((0, 17), (17, 20), (20, 53)):
        torch.testing.assert_close(_attend(layer, EXACT, q, k, v, start, stop), dense[:, :, start:stop], **CLOSE)
    for t in range(53, 70):
        torch.testing.assert_close(_attend(layer, EXACT, q, k, v, t, t + 1), whole[:, :, t : t + 1], **CLOSE)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("layer", [CondensedLayer, partial(StaticCondensedLayer, max_cache_len=70)])
def test_chunks_read_the_stored_tokens_that_a_whole_prompt_reads(layer, bits):
    """Also in the first chunk, all of whose tokens the window still holds unquantised."""
    method = EXACT.replace(store_bits=bits)
    q, k, v = oracle.random_qkv(1, 4, 2, 70, 8, 8)
    whole, layer = condense.attention(q, k, v, method=method, scale=0.3), layer(method)
    for start, stop in ((0, 17), (17, 45), (45, 70)):
        torch.testing.assert_close(_attend(layer, method, q, k, v, start, stop), whole[:, :, start:stop], **CLOSE)


@pytest.mark.parametrize("layer", [CondensedLayer(EXACT), StaticCondensedLayer(EXACT, 99)], ids=["growing", "static"])
def test_a_turn_with_more_padding_than_tokens_is_dense(layer):
    """The window then has as many columns as rows have tokens, some of which hold nothing."""
    q, k, v = oracle.random_qkv(2, 4, 2, 45, 8, 8)
    want = condense.attention(q, k, v, method=DENSE, scale=0.3)
    _attend(layer, EXACT, q, k, v, 0, 40)
    new = [torch.nn.functional.pad(x[:, :, 40:], (0, 0, 40, 0)) for x in (q, k, v)]
    request = read_request(new[0], scale=0.3, counts=torch.tensor([5, 5]))
    out = EXACT.attend(new[0], layer.read(new[1], new[2], request), scale=0.3)[0]
    torch.testing.assert_close(out[:, :, 40:], want[:, :, 40:], **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_generate_reads_its_prompt_as_a_dense_model(name, cache):
    model, ids = tiny.model(name), tiny.tokens(1, 61)
    settings = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    want = model.generate(ids, **settings).logits
    with condense.use(model, EXACT):
        exact = model.generate(ids, cache_implementation=cache, **settings).logits
    with condense.use(model, RECALL):
        recalled = model.generate(ids, cache_implementation=cache, **settings).logits
    torch.testing.assert_close(exact[0], want[0], rtol=0, atol=1e-9)
    assert not torch.allclose(recalled[0], want[0], rtol=0, atol=1e-6)


def test_it_is_not_for_training():
    q, k, v = (x.requires_grad_() for x in oracle.random_qkv(1, 2, 2, 40, 8, 8))
    with pytest.raises(ValueError, match="train with prompt='recall'"):
        condense.attention(q, k, v, method=EXACT)


def test_inspect_says_so():
    model = tiny.model("llama")
    exact, dense, recall = (inspect(model, method, 4096, 2)[0] for method in (EXACT, DENSE, RECALL))
    assert "dense attention" in exact.remark
    assert exact.flops > dense.flops > recall.flops  # beside attention, entries are made
