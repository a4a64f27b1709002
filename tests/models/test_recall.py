"""Recall in models, beside the laws of `test_laws`: exact prompts, crops, stores in host memory."""

import pytest
import torch
from models import tiny
from models.tiny import IDS, MASK, ROWS
from transformers import DynamicCache, StaticCache

import condense
from condense.caches import store

METHOD = tiny.RECALL
HOST = METHOD.replace(store="host", slots=3)
LAYERS, CHUNKS = 3, (20, 17, 1, 16)
LONG, LONG_MASK = tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (54, 47)])


@pytest.mark.parametrize("model", tiny.RECALLS.values(), ids=tiny.RECALLS, indirect=True)
def test_exact_prompts_read_the_same_stored_tokens_in_a_padded_batch(model):
    """As the rows alone, whose prompts are read with dense attention over the tokens as they are stored."""
    condense.apply(model, METHOD.replace(prompt="exact", store_bits=8))
    got = tiny.logits(model, IDS, attention_mask=MASK, position_ids=(MASK.cumsum(1) - 1).clamp(min=0))
    for row, out in zip(ROWS, got, strict=True):
        torch.testing.assert_close(out[-len(row) :], tiny.logits(model, row[None])[0], **tiny.exact(model))


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_a_store_is_checked_for_latents_of_their_width(kind, monkeypatch):
    """As on a GPU, where what is stored in few bits is turned back in blocks, of which latents must be whole ones."""
    model, widths = condense.apply(tiny.model("deepseek_v3"), METHOD.replace(store="host")), set()
    monkeypatch.setattr(
        "condense.caches.store.Store.check",
        lambda store, k, v, latent, groups=None: widths.add((k.shape[3] - v.shape[3], latent)),
    )
    mode = {"cache_implementation": "static"} if kind == "static" else {}
    tiny.generate(model, ROWS[0][None], **mode)
    latent = model.config.kv_lora_rank
    assert widths == {(latent + model.config.qk_rope_head_dim, latent)}


@pytest.mark.parametrize("cause", ["has no attention dropout", "keeps no gradients"])
def test_a_call_is_refused_before_a_token_is_stored(cause):
    changes, bits = ({"attention_dropout": 0.5}, 16) if "dropout" in cause else ({}, 8)
    model, ids = condense.apply(tiny.model("llama", **changes), METHOD.replace(store_bits=bits)), tiny.tokens(1, 40)
    cache = tiny.filled(model, ids)
    with torch.set_grad_enabled(bits < 16), pytest.raises(ValueError, match=cause):
        model.train(bits == 16)(ids[:, :5], past_key_values=cache, use_cache=True)
    assert [layer.get_seq_length() for layer in cache.layers] == [40] * tiny.NUM_LAYERS


def test_beams_move_rows_in_no_layer_if_one_refuses():
    """The first layer alone, whose store is on the device, could move them."""
    model = condense.apply(tiny.model("llama"), HOST)
    cache, untouched = (tiny.filled(model, tiny.tokens(2, 40)) for _ in range(2))
    with pytest.raises(ValueError, match="beams"):
        cache.reorder_cache(torch.tensor([1, 1]))
    more = tiny.tokens(2, 5, seed=3)
    got, expected = (tiny.logits(model, more, past_key_values=c, use_cache=True) for c in (cache, untouched))
    assert got.equal(expected)


@pytest.fixture
def fetches(monkeypatch):
    """Copies that were begun for the next layer while a layer attends, and for each store read if it was one of them.
    On a CPU there is nothing to copy, so that the functions that copy are replaced by ones that only tell.
    """
    begun, used = [], []

    def begin(tensor, count, device):
        begun.append(tensor[:, :, :count].clone() if count else None)
        return begun[-1]

    def read(self, tensor, count, device):
        fetched, self._fetched = self._fetched, None
        used.append(fetched is not None and any(fetched is x for x in begun))
        if fetched is not None:
            assert fetched.shape[2] >= count
            assert torch.equal(fetched[:, :, :count], tensor[:, :, :count])
        return tensor[:, :, :count]

    monkeypatch.setattr(store, "_begin_to_fetch", begin)
    monkeypatch.setattr(store.Store, "read", read)
    return begun, used


@pytest.mark.parametrize("padded", [False, True], ids=["real", "padded"])
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_the_next_layers_tokens_are_fetched(fetches, name, static, padded):
    begun, used = fetches
    model = condense.apply(tiny.model(name, num_hidden_layers=LAYERS), HOST)
    ids, mask = (LONG, LONG_MASK) if padded else (LONG[:1], None)
    cache = StaticCache(model.config, max_cache_len=80) if static else DynamicCache(config=model.config)
    want = tiny.in_chunks(model, ids, CHUNKS, cache, mask=mask)
    # the second and the fourth piece, the third being a step; the first layer's tokens are copied when it reads
    assert used == [False, True, True] * 2
    assert sum(x is not None for x in begun) == 4
    begun.clear()
    used.clear()
    device = condense.apply(model, HOST.replace(store="device"))
    cache = StaticCache(model.config, max_cache_len=80) if static else DynamicCache(config=model.config)
    assert torch.equal(tiny.in_chunks(device, ids, CHUNKS, cache, mask=mask), want)


def test_tokens_are_fetched_once_for_a_layer_behind_layers_without_a_store(fetches):
    begun, used = fetches
    model = tiny.model("llama", num_hidden_layers=3)
    condense.apply(model, {"0-1": condense.CCA(group_size=4, window=8), "2": HOST})
    tiny.in_chunks(model, LONG[:1], CHUNKS, DynamicCache(config=model.config))
    # the first piece has nothing to copy; the third is a single token, for which nothing is copied ahead
    assert used == [True, True]
    assert sum(x is not None for x in begun) == 2
