"""Stored tokens are fetched for the next layer while a layer attends: the right ones, once, and in every kind of cache.

On a CPU there is nothing to copy, so that the functions that copy are replaced by ones that only tell.
"""

import pytest
import torch
from models import tiny
from transformers import DynamicCache, StaticCache

import condense
from condense.caches import store

METHOD = condense.Recall(group_size=4, window=8, num_recall=2, store="host", slots=3)
LAYERS, CHUNKS = 3, (20, 17, 1, 16)
IDS, MASK = tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (54, 47)])


@pytest.fixture
def fetches(monkeypatch):
    """Copies that were begun, and for each store that was read, whether it was one of these."""
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
def test_the_next_layers_tokens(fetches, name, static, padded):
    begun, used = fetches
    model = condense.apply(tiny.model(name, num_hidden_layers=LAYERS), METHOD)
    ids, mask = (IDS, MASK) if padded else (IDS[:1], None)
    cache = StaticCache(model.config, max_cache_len=80) if static else DynamicCache(config=model.config)
    want = tiny.in_chunks(model, ids, CHUNKS, cache, mask=mask)
    # the second and the fourth piece, the third being a step; the first layer's tokens are copied when it reads
    assert used == [False, True, True] * 2
    assert sum(x is not None for x in begun) == 4
    begun.clear()
    used.clear()
    device = condense.apply(model, METHOD.replace(store="device"))
    cache = StaticCache(model.config, max_cache_len=80) if static else DynamicCache(config=model.config)
    assert torch.equal(tiny.in_chunks(device, ids, CHUNKS, cache, mask=mask), want)


def test_once_for_a_layer_behind_layers_without_a_store(fetches):
    begun, used = fetches
    model = tiny.model("llama", num_hidden_layers=3)
    condense.apply(model, {"0-1": condense.CCA(group_size=4, window=8), "2": METHOD})
    tiny.in_chunks(model, IDS[:1], CHUNKS, DynamicCache(config=model.config))
    # the first piece has nothing to copy; the third is a single token, for which nothing is copied ahead
    assert used == [True, True]
    assert sum(x is not None for x in begun) == 2
