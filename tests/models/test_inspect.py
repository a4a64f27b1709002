"""The closed forms of `inspect`, counted query by query here; and the requests that fit, by hand."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from grids import grid
from models import small, tiny
from oracles import cases
from transformers import AutoModelForCausalLM

import condense
from condense.methods import Layout
from condense.models.fit import cache_fits, weight_bytes
from condense.models.inspect import inspect, served_layers
from condense.models.shapes import shape_config
from condense.named import NAMED_SETTINGS
from condense.ops import UniformRule

METHODS = tiny.METHODS | {
    "dga-no-focal": condense.DGA(group_size=3, gamma=0, window=2),
    "long-group": condense.CCA(group_size=17, window=3, summary="streaming"),
    "no-sinks": condense.StreamingLLM(sink=0, window=9),
}
LENGTH = 8192
RECALLS = cases.RECALLS | {"two-open": tiny.RECALL, "a-tenth": tiny.RECALL.replace(num_recall=0.1, min_recall=0)}
RECALLS["shared"] = tiny.RECALL.replace(num_recall=0.1, min_recall=5, prompt="shared")


@dataclass(frozen=True, kw_only=True)
class Keep(condense.Method):
    """Keeps the tokens of groups for a way of its own, beside their means."""

    name: ClassVar[str] = "keep"

    @property
    def layout(self):
        return Layout(UniformRule(chunk=4, window=6))

    def represent(self, chunks, summary, *, scale, backend):
        k, v = chunks.tokens()
        return k.mean(3), v.mean(3), torch.cat([k, v], -1).flatten(2, 3)

    def attend(self, q, context, **options):
        return super().attend(q, context, **options)


@pytest.mark.parametrize(("name", "method"), [("llama", Keep()), ("deepseek_v3", Keep()), ("llama", tiny.SELECT)])
def test_tensors_of_a_methods_own_and_of_a_selection_count_too(name, method):
    model = condense.apply(tiny.model(name), method)
    held = sum(x.nbytes for layer in tiny.filled(model, tiny.tokens(1, 60)).layers for x in layer.state.tensors)
    reports = inspect(model, method, 60, itemsize=8)
    assert held == sum(report.bytes for report in reports)
    assert all(report.flops < report.dense_flops for report in reports)
    assert all((report.remark is None) is (method is tiny.SELECT) for report in reports)


def flops(name, method, length):
    """FLOPs of one layer: keys that each query sees, and chunks as they are pooled."""
    rule, total = method.layout.rule, 0
    latent = name == "deepseek_v3"
    H, D, Dv = (4, 12, 6) if latent else (4, 8, 8)
    numbers, scored = (16, 16) if latent else (2 * 2 * 8, 2 * 8)
    summary = 2 * H * 12 * 8 + H * 4 if latent else H * D
    for t in range(length):
        closed = 0 if rule.window is None else max(0, t + 1 - rule.window) // rule.chunk
        kept = closed if rule.max_chunks is None else min(closed, rule.max_chunks)
        total += (kept * rule.entries + t + 1 - closed * rule.chunk) * H * 2 * (D + Dv)
    chunks = max(0, length - method.layout.summary_delay) // rule.chunk
    chunks = chunks if rule.max_chunks is None else min(chunks, rule.max_chunks)
    total += chunks * (rule.chunk - rule.entries + 1) * 2 * numbers
    total += chunks * rule.entries * 2 * H * 12 * (8 + 6) if latent else 0
    return total + (chunks * rule.chunk * 2 * scored + length * summary if method.layout.num_summary > 0 else 0)


def recall_flops(name, method, length):
    """FLOPs of one layer of Recall; of latents, absorbed queries ask the index, and what is read is expanded."""
    H, D, Dv, asked, absorb, expand = 4, 8, 8, 8, 0, 0
    if name == "deepseek_v3":
        D, Dv, asked, absorb, expand = 12, 6, 16, 2 * 4 * 12 * 8, 2 * 4 * 12 * (8 + 6)
    g, total, scored = method.group_size, 0, 0
    quota = method.quota._replace(least=3) if method.prompt == "shared" else method.quota
    for t in range(length):
        closed = max(0, t + 1 - method.window) // g
        opened = quota.at(closed)
        total += (opened * g + t + 1 - closed * g) * H * 2 * (D + Dv)
        scored += closed * g
    if opened == closed:  # nothing is chosen
        scored = 0
    elif method.prompt == "shared":  # by one query of 2g, and by the last 64
        scored = scored // g // (2 * g) * g + min(64, length) * closed * g
    total += scored * H * 2 * asked
    total += length * absorb if scored > 0 else 0
    return total + closed * g * expand


STORED = RECALLS | {"store-4": condense.Recall(group_size=6, window=5, num_recall=2, store_bits=4)}
STORED["entries-8-pooled"] = tiny.CCA.replace(entry_bits=8)
COUNTED = [(method, flops) for method in METHODS.values()] + [(method, recall_flops) for method in RECALLS.values()]


@grid(20, name=["llama", "deepseek_v3"], counted=dict(zip([*METHODS, *RECALLS], COUNTED, strict=True)))
def test_flops(name, counted):
    method, count = counted
    model = tiny.model(name)
    for length in (1, 2, 9, 40, 199):
        report = inspect(model, {"rest": method}, length)[0]
        dense = flops(name, condense.Dense(), length)
        assert (report.flops, report.dense_flops) == (count(name, method, length), dense)

    # a billion tokens
    report = inspect(tiny.model("llama"), condense.StreamingLLM(sink=4, window=8), 10**9)[0]
    assert report.dense_flops == 10**9 * (10**9 + 1) // 2 * 4 * 2 * 16  # more than 64 bits hold
    assert 8 * 10**9 * 128 < report.flops < 14 * 10**9 * 128


@pytest.mark.parametrize("name", ["gemma4_text", "mimo_v2_flash"])
def test_layers_of_one_model_may_have_other_heads(name):
    model, ids = small.model(name), tiny.tokens(1, 60)
    reports = inspect(model, tiny.CCA, 60, itemsize=8)
    of_entry = [report.dense_bytes // report.dense_entries for report in reports]
    held = tiny.filled(model, ids).layers
    assert of_entry == [8 * x.keys.shape[1] * (x.keys.shape[3] + x.values.shape[3]) for x in held]
    assert len({(x.keys.shape[1], x.keys.shape[3], x.values.shape[3]) for x in held}) == 2
    full = next(report for report in reports if report.method is not None)
    with condense.use(model, tiny.CCA):
        state = tiny.filled(model, ids).layers[full.layer].state
    assert full.bytes == sum(x.nbytes for x in state.tensors)


@grid(30, name=["llama", *tiny.LATENT], method=METHODS | STORED, dtype=[torch.float64, torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_cache(name, method, dtype):
    model, ids = tiny.model(name, dtype), tiny.tokens(1, 100)
    for length in (3, 57, 100):
        reports = inspect(model, method, length, itemsize=dtype.itemsize)
        with condense.use(model, method):
            cache = tiny.filled(model, ids[:, :length])
        held = sum(x.nbytes for layer in cache.layers for x in layer.state.tensors)
        assert held == sum(report.bytes for report in reports)
        assert held <= condense.cache_nbytes(cache)
        for layer, report in zip(cache.layers, reports, strict=True):
            columns = [layer.state.window_k, layer.state.entries[0], *layer.state.entries[2:][-1:]]
            assert report.entries == sum(x.shape[2] for x in columns if x.shape[3] > 0)


def test_what_a_step_of_recall_reads_and_what_lies_in_host_memory():
    """In 100 tokens 92 are behind the window, in 23 groups, two of them open."""
    report = inspect(tiny.model("llama"), RECALLS["two-open"], 100)[1]
    # a byte of signs and a step of 2 bytes per token, and of a centre 4 bytes and a step
    keys, index, of_sum = 2 * 4 + 8, 2 * (4 * (1 + 2) + 4 + 2), 2 * 8 * 8
    assert f"a step after them reads {keys * 32 * 2 + 23 * index + of_sum:,} bytes of it" in report.remark
    assert "all 100 tokens stay on the device, so the cache is larger than a dense one" in report.remark
    assert report.bytes > report.dense_bytes
    # in host memory those 92 are counted apart; on the device are slots, each with two numbers of 4 bytes
    stored, method = report, RECALLS["two-open"].replace(store="host", slots=5)
    report = inspect(tiny.model("llama"), method, 100)[1]
    assert report.host_bytes == 92 * 32 * 2
    assert report.bytes == stored.bytes - 92 * 32 * 2 + 5 * (4 * 32 * 2 + 2 * 8)
    assert report.entries == stored.entries - 92 + 20
    assert "of 100 tokens, 5,888 bytes per layer lie in host memory" in report.remark
    # no more slots than groups
    whole = inspect(tiny.model("llama"), method.replace(slots=512), 100)[1]
    assert whole.bytes == report.bytes + (23 - 5) * (4 * 32 * 2 + 2 * 8)
    assert stored.host_bytes == 0
    # exact prompts take what dense attention takes
    exact = inspect(tiny.model("llama"), method.replace(prompt="exact"), 4096)[1]
    assert "dense attention" in exact.remark
    assert exact.flops == exact.dense_flops > inspect(tiny.model("llama"), method, 4096)[1].flops


def skeleton(shape):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape_config(shape))


def test_layers_with_latents_are_served_if_all_are_condensed_and_some_models_by_no_engine():
    model, method = skeleton("minicpm3-4b"), condense.Method.parse("recall-device")
    layers = served_layers(model, method, 4096)
    assert {(layer.heads, layer.widths, layer.plan is not None) for layer in layers} == {(1, (288, 0), True)}
    tiny.refused("layer 1 has latents and no method", served_layers, model, {0: method, "rest": condense.Dense()}, 4096)
    choices = {"own": condense.CCA(group_size=4, window=8)}
    for model, is_served in ((tiny.model("llama", torch.bfloat16), True), (small.model("olmo2"), False)):
        (*_, own) = cache_fits(model, choices, 4096, memory=2**30)
        assert (own.served is not None, own.served_bytes is not None) == (is_served, is_served)


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
    # in a condensed model's cache 20 tokens more, that can be taken back
    assert pooled.device_bytes == 40 * 1044 * token + 8 * full
    served = served_layers(model, condense.Method.parse("pooled"), 4096)
    assert [layer.sliding for layer in served] == ([1024] * 5 + [None]) * 8
    assert [layer.plan is None for layer in served] == ([True] * 5 + [False]) * 8
    # entries, the window, and beside it the newest queries and what waits to be pooled
    kept = (LENGTH - 512) // 16 + 512
    assert kept * token <= full < (kept + 64) * token


def test_requests_share_what_weights_leave_and_the_host():
    model = tiny.model("llama", torch.bfloat16)
    host = condense.Recall(group_size=16, window=256, unchosen="drop", store="host", slots=4)
    choices = {"own": condense.CCA(group_size=4, window=8), "host": host}
    weights = weight_bytes(model, 2)
    assert weights == sum(p.nbytes for p in model.parameters())
    *_, own, host = cache_fits(model, choices, 4096)
    # nine tenths of the memory hold the weights and seven caches, but for a byte
    room = int((weights + 7 * own.device_bytes) / 0.9)
    for memory, count in ((room + 2, 7), (room - 2, 6), (weights, 0)):
        assert cache_fits(model, choices, 4096, memory=memory)[3].requests == count
    layers = model.config.num_hidden_layers
    stored = 3840 * 2 * 2 * 8 * 2
    assert host.host_bytes == (layers - 1) * stored  # the first layer's lie on the device
    for spare, count in ((0, 3), (-1, 2)):
        (*_, limited) = cache_fits(model, choices, 4096, memory=2**40, host_memory=3 * host.host_bytes + spare)
        assert limited.requests == count
    (*_, free) = cache_fits(model, choices, 4096, memory=2**40)
    assert free.requests > 1000


@pytest.mark.parametrize("shape", ["llama-2-7b", "llama-3.1-70b", "deepseek-v2-lite"])
def test_every_named_setting_is_counted_for_every_shape(shape):
    choices = {name: condense.Method.parse(name) for name in NAMED_SETTINGS}
    dense, _, _, *fits = cache_fits(skeleton(shape), choices, 131072)
    assert all(0 < fit.device_bytes < dense.device_bytes for fit in fits)
    assert [fit.host_bytes > 0 for fit in fits] == [name == "recall-host" for name in choices]
