"""How many requests fit: the arithmetic of `condense inspect --memory`, counted by hand here."""

import pytest
import torch
from models import tiny
from transformers import AutoModelForCausalLM

import condense
from condense.models.fit import cache_fits, weight_bytes
from condense.models.inspect import inspect
from condense.models.shapes import shape_config
from condense.named import NAMED_SETTINGS

LENGTH = 8192
HOST = condense.Recall(group_size=16, window=256, unchosen="drop", store="host", slots=4)


def skeleton(shape):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape_config(shape))


def test_dense_caches_in_16_8_and_4_bits():
    numbers = 36 * 2 * 8 * 128 * LENGTH  # layers, keys and values, KV heads, width
    fits = cache_fits(skeleton("qwen3-8b"), {"own": condense.CCA()}, LENGTH)
    wanted = {"dense": 2 * numbers, "dense, FP8": numbers, "dense, 4 bits": numbers * 9 // 16}
    assert {fit.name: fit.device_bytes for fit in fits[:3]} == wanted
    assert [fit.requests for fit in fits] == [None] * 4


def test_sliding_layers_keep_their_window_beside_full_ones():
    """Gemma 3: of 48 layers every sixth sees all tokens, the others the last 1,024."""
    model, token = skeleton("gemma-3-12b"), 2 * 8 * 256 * 2
    dense, *_, pooled = cache_fits(model, {"pooled": condense.Method.parse("pooled")}, LENGTH)
    assert dense.device_bytes == (8 * LENGTH + 40 * 1024) * token
    full = inspect(model, "pooled", LENGTH)[5].bytes
    assert pooled.device_bytes == 40 * 1024 * token + 8 * full
    # entries, the window, and beside it the newest queries and what waits to be pooled
    kept = (LENGTH - 512) // 16 + 512
    assert kept * token <= full < (kept + 64) * token


def test_requests_share_what_weights_leave_and_the_host():
    model = tiny.model("llama", torch.bfloat16)
    choices = {"own": condense.CCA(group_size=4, window=8), "host": HOST}
    weights = weight_bytes(model, 2)
    assert weights == sum(p.nbytes for p in model.parameters())
    *_, own, host = cache_fits(model, choices, 4096)
    # nine tenths of the memory hold the weights and seven caches, but for a byte
    room = int((weights + 7 * own.device_bytes) / 0.9)
    for memory, count in ((room + 2, 7), (room - 2, 6), (weights, 0)):
        assert cache_fits(model, choices, 4096, memory=memory)[3].requests == count
    # 3,840 tokens are stored, which in each layer take the power of two above
    layers = model.config.num_hidden_layers
    stored = 3840 * 2 * 2 * 8 * 2
    assert host.host_bytes == layers * stored
    for spare, count in ((0, 3), (-1, 2)):
        host_memory = 3 * layers * 4096 * 2 * 2 * 8 * 2 + spare
        (*_, limited) = cache_fits(model, choices, 4096, memory=2**40, host_memory=host_memory)
        assert limited.requests == count
    (*_, free) = cache_fits(model, choices, 4096, memory=2**40)
    assert free.requests > 1000


@pytest.mark.parametrize("shape", ["llama-2-7b", "llama-3.1-70b", "deepseek-v2-lite"])
def test_every_named_setting_is_counted_for_every_shape(shape):
    choices = {name: condense.Method.parse(name) for name in NAMED_SETTINGS}
    dense, _, _, *fits = cache_fits(skeleton(shape), choices, 131072)
    assert all(0 < fit.device_bytes < dense.device_bytes for fit in fits)
    assert [fit.host_bytes > 0 for fit in fits] == [name == "recall-host" for name in choices]
