"""Recall with its store in pinned memory: the bits of the store on the device, however it is read, moved and copied."""

import copy

import pytest
import torch
from models import tiny
from transformers import DynamicCache, StaticCache

import condense
from condense.ops.tensors.pinned import pinned_zeros

DEVICE_STORE = condense.Recall(group_size=4, window=8, num_recall=3)
SLOTS = (0, 2, 12, 100)
KEPT = {"defaults": {}, "8-bits": {"store_bits": 8}, "4-bits": {"store_bits": 4}, "drop": {"unchosen": "drop"}}
IDS = tiny.tokens(2, 90, seed=4)


def model_of(name):
    return tiny.model(name, torch.float32, max_position_embeddings=1024).to("cuda")


@pytest.fixture(scope="module")
def model():
    return model_of("llama")


def _logits(model, method, cache_of, sizes):
    with condense.use(model, method), torch.no_grad():
        cache, ids = cache_of(model.config), IDS.cuda()
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(sizes, dim=1)]
    return torch.cat(parts, dim=1), cache


# static, growing
CACHES = (lambda config: StaticCache(config, max_cache_len=120)), (lambda config: DynamicCache(config=config))


@pytest.mark.parametrize("cache_of", CACHES, ids=["static", "growing"])
@pytest.mark.parametrize(("name", "slots"), [*(("llama", n) for n in SLOTS), ("deepseek_v2", 2)])
def test_chunks_and_steps(name, cache_of, slots):
    model = model_of(name)
    sizes = [30, 1, 1, 17, *[1] * 41]
    want, _ = _logits(model, DEVICE_STORE, cache_of, sizes)
    got, cache = _logits(model, DEVICE_STORE.replace(store="host", slots=slots), cache_of, sizes)
    assert torch.equal(got, want)
    first, *others = (layer.buffers if cache_of is CACHES[0] else layer._ring.buffers for layer in cache.layers)
    assert first.store.is_cuda  # all of its groups are open
    for buffers in others:
        assert buffers.store.is_pinned()
        assert buffers.slots.is_cuda


@pytest.mark.parametrize("of_groups", KEPT.values(), ids=KEPT)
def test_graph_of_two_prompts(model, of_groups):
    outs, on_device = [], DEVICE_STORE.replace(**of_groups)
    for method in (on_device, on_device.replace(store="host", slots=2), on_device.replace(store="host")):
        with condense.use(model, method):
            decoder = condense.GraphDecoder(model, batch_size=2, max_length=300)
            assert decoder.model is model
            runs = []
            for ids, chunk in ((IDS, None), (tiny.tokens(2, 70, seed=9), 16)):
                logits = [decoder.prefill(ids.cuda(), chunk=chunk)]
                for _ in range(200):
                    logits.append(decoder.step(logits[-1].argmax(-1)))
                runs.append(torch.stack(logits))
        outs.append(runs)
    for runs in outs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs, outs[0], strict=True))


def test_a_copied_cache_goes_on_as_its_original(model):
    method = DEVICE_STORE.replace(store="host", slots=3)
    for cache_of in CACHES:
        _, cache = _logits(model, method, cache_of, [60, *[1] * 30])
        other = copy.deepcopy(cache)
        with condense.use(model, method), torch.no_grad():
            for token in tiny.tokens(2, 20, seed=5).cuda().split(1, dim=1):
                assert torch.equal(*(model(token, past_key_values=x, use_cache=True).logits for x in (cache, other)))


def test_pinned_memory_is_unpinned_before_it_is_freed():
    """Memory that is taken anew mostly lies where the freed one lay, and cannot be pinned twice."""
    addresses = set()
    for i in range(5):
        pinned = pinned_zeros((2, 3, 2**20 + 5, 16), torch.uint8, torch.device("cuda"))
        view = pinned[1]
        del pinned
        assert view.is_pinned()
        assert torch.equal(view[2, -3:].cuda() + i, torch.full((3, 16), i, dtype=torch.uint8, device="cuda"))
        view.fill_(9)
        addresses.add(view.data_ptr())
    assert len(addresses) < 5
