"""The bytes that a cache allocates, measured on the storages of its tensors."""

import math
from fractions import Fraction

import pytest
import torch
from models import tiny
from transformers import DynamicCache, StaticCache

import condense
from condense.models.inspect import inspect

METHODS = {
    "last-256": condense.CCA(group_size=16, window=256),
    "streaming-256": condense.CCA(group_size=16, window=256, summary="streaming"),
    "lca-256": condense.LCA(group_size=16, window=256),
    "entries-4": condense.CCA(group_size=16, window=256, entry_bits=4),
    "dga": condense.DGA(),
    "dga-streaming": condense.DGA(gamma=0.3, window=5, summary="streaming"),
    "dga-select": condense.DGA(selection="prompt"),
    "dga-select-half": condense.DGA(selection="prompt", gamma=0.5, min_focal=64, rep_bias="log_size"),
}
# dtype, rows, lengths; the fused projections of gpt2 and phi3 make keys and values views of something larger
MODELS = {
    "llama-gqa": ("llama", torch.float32, 1, (4096, 4103)),
    "llama-bfloat16": ("llama", torch.bfloat16, 2, (4096,)), "llama-mha": ("llama-mha", torch.float32, 1, (4096,)),
    "phi3-fused": ("phi3", torch.float32, 1, (4096,)), "gpt2-fused": ("gpt2", torch.float32, 1, (4103,)),
    "gpt2-bfloat16": ("gpt2", torch.bfloat16, 2, (4096,)), "latents": ("deepseek_v3", torch.bfloat16, 2, (4096,)),
}  # fmt: skip
STEPS = 20
# every method on one model, every model with a method whose queries are kept and one whose prompt is chosen from
CASES = [("llama-gqa", method) for method in METHODS]
CASES += [(model, method) for model in MODELS if model != "llama-gqa" for method in ("streaming-256", "dga-select")]
CASES = [case for case in CASES if case != ("latents", "dga-select")]  # refused


def _model(name, dtype):
    changes = {"num_key_value_heads": 4} if name == "llama-mha" else {}
    changes |= {"n_positions" if name == "gpt2" else "max_position_embeddings": 4103 + STEPS}
    changes |= {"n_layer" if name == "gpt2" else "num_hidden_layers": 2}
    return tiny.model(name.removesuffix("-mha"), dtype, **changes)


def _bytes(model, method, length):
    """Bytes of one row as `inspect` counts them, which `test_inspect` holds to those of states, and to arithmetic."""
    return sum(report.bytes for report in inspect(model, method, length, model.dtype.itemsize))


@pytest.mark.parametrize(("model", "method"), CASES, ids=str)
def test_bytes_after_prefill_and_decode(model, method):
    (name, dtype, rows, lengths), method = MODELS[model], METHODS[method]
    model = condense.apply(_model(name, dtype), method)
    ids = tiny.tokens(rows, max(lengths) + STEPS)
    for length in lengths:
        cache, most = tiny.filled(model, ids[:, :length]), 1.15 * rows * _bytes(model, method, length)
        assert condense.cache_nbytes(cache) <= most
        with torch.no_grad():
            for step in range(length, length + STEPS):
                model(ids[:, step : step + 1], past_key_values=cache)
                assert condense.cache_nbytes(cache) <= most


def test_bytes_after_crop_and_row_changes():
    method = METHODS["streaming-256"]
    model = condense.apply(_model("llama", torch.float32), method)
    cache = tiny.filled(model, tiny.tokens(2, 4096))
    cache.crop(-20)
    most = 1.15 * 2 * _bytes(model, method, 4096)
    assert condense.cache_nbytes(cache) <= most
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 3, 0, 1]))
    assert condense.cache_nbytes(cache) <= 2 * most
    cache.reset()
    assert condense.cache_nbytes(cache) == 0


STATIC = {name: method for name, method in METHODS.items() if not method.reads_prompt}


@pytest.mark.parametrize("method", STATIC.values(), ids=STATIC.keys())
def test_bytes_of_a_static_cache_are_taken_at_once(method):
    model = condense.apply(_model("llama", torch.float32), method)
    cache = StaticCache(model.config, max_cache_len=4096)
    g, focal = method.group_size, math.ceil(Fraction(str(getattr(method, "gamma", 0))) * method.group_size)
    entries = (focal + 1) * ((4096 - method.layout.summary_delay) // (g + focal))
    numbers = 2 * (method.window + g + focal) + method.layout.num_summary
    for L in (20, 1, 300):
        with torch.no_grad():
            model(tiny.tokens(1, L), past_key_values=cache)
        # two counters and two of first entries in int64; in int32 how many parts of a step are done, by head and in all
        counters = 4 * 8 + (2 + 1) * 4
        # of 4 bits an entry has codes, a step and a zero, up to a multiple of 8 bytes
        of_an_entry = 16 if getattr(method, "entry_bits", 16) == 4 else 8 * 4
        of_heads = 2 * (2 * entries * of_an_entry + numbers * 8 * 4)
        assert condense.cache_nbytes(cache) == 2 * (of_heads + counters)


def test_bytes_of_a_stock_cache_and_of_views_and_of_nothing_else():
    assert condense.cache_nbytes(tiny.filled(tiny.model("llama"), tiny.tokens(2, 50))) == 2 * 50 * 2 * 16 * 8 * 3
    cache, whole = DynamicCache(), torch.zeros(1, 2, 1000, 8)
    assert condense.cache_nbytes(cache) == 0
    cache.update(whole[:, :, :0], whole[:, :, :10], 0)
    cache.layers[0].keys, cache.layers[0].values = whole[:, :, :0], whole[:, :, :10]
    assert condense.cache_nbytes(cache) == whole.nbytes
    for value in (None, [torch.zeros(3)], "cache"):
        tiny.refused("cache must be a transformers Cache", condense.cache_nbytes, value)
