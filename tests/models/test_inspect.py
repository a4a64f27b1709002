"""What `inspect` says in closed form, counted query by query here."""

import torch
from grids import grid
from models import tiny

import condense
from condense.models.inspect import inspect

METHODS = tiny.METHODS | {
    "dga-no-focal": condense.DGA(group_size=3, gamma=0, window=2),
    "long-group": condense.CCA(group_size=17, window=3, summary="streaming"),
    "no-sinks": condense.StreamingLLM(sink=0, window=9),
}


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


RECALLS = {
    "bounds": condense.Recall(group_size=4, window=8, num_recall=2),
    "one-block": condense.Recall(group_size=8, window=3, num_recall=1, index_size=8, index_bits=16),
    "whole-drop": condense.Recall(group_size=6, window=0, num_recall=3, unchosen="drop"),
    "none-open": condense.Recall(group_size=4, window=5, num_recall=0, index_bits=4),
    "a-third-open": condense.Recall(group_size=4, window=5, num_recall=1 / 3, index_size=2),
    "three-open": condense.Recall(group_size=8, window=5, num_recall=3, index_size=8),
}


def recall_flops(name, method, length):
    """FLOPs of one layer of Recall; of latents, absorbed queries ask the index, and what is read is expanded."""
    H, D, Dv, numbers, asked, absorb, expand = 4, 8, 8, 32, 8, 0, 0
    if name == "deepseek_v3":
        D, Dv, numbers, asked, absorb, expand = 12, 6, 16, 16, 2 * 4 * 12 * 8, 2 * 4 * 12 * (8 + 6)
    g, total = method.group_size, 0
    blocks, pool = g // method.index_settings.size, method.unchosen == "pool"
    for t in range(length):
        closed = max(0, t + 1 - method.window) // g
        opened = method.quota.at(closed)
        entries = closed - opened if pool else 0
        total += (entries + opened * g + t + 1 - closed * g) * H * 2 * (D + Dv)
        total += closed * blocks * H * 2 * asked * 2
    total += length * absorb if closed > 0 else 0
    return total + closed * (g * 2 * numbers * pool + (g + pool) * expand)


STORED = RECALLS | {
    "entries-4": condense.Recall(group_size=4, window=8, num_recall=2, entry_bits=4),
    "entries-8-matched": condense.Recall(group_size=4, window=8, num_recall=2, entry_bits=8, rep_bias="matched"),
    "entries-8-pooled": condense.CCA(group_size=4, window=8, entry_bits=8),
    "store-8": condense.Recall(group_size=4, window=8, num_recall=2, store_bits=8),
    "store-4-matched": condense.Recall(group_size=6, window=5, num_recall=2, store_bits=4, rep_bias="matched"),
}
COUNTED = [(method, flops) for method in METHODS.values()] + [(method, recall_flops) for method in RECALLS.values()]


@grid(16, name=["llama", "deepseek_v3"], counted=dict(zip([*METHODS, *RECALLS], COUNTED, strict=True)))
def test_flops(name, counted):
    method, count = counted
    model = tiny.model(name)
    for length in (1, 2, 9, 40, 199):
        report = inspect(model, method, length)[0]
        dense = flops(name, condense.Dense(), length)
        assert (report.flops, report.dense_flops) == (count(name, method, length), dense)


def test_a_billion_tokens():
    report = inspect(tiny.model("llama"), condense.StreamingLLM(sink=4, window=8), 10**9)[0]
    assert report.dense_flops == 10**9 * (10**9 + 1) // 2 * 4 * 2 * 16  # more than 64 bits hold
    assert 8 * 10**9 * 128 < report.flops < 14 * 10**9 * 128


@grid(12, name=["llama", "deepseek_v3"], method=STORED, dtype=[torch.float64, torch.float32, torch.bfloat16])
def test_recalls_bytes_are_those_of_its_cache(name, method, dtype):
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


def test_what_a_step_of_recall_reads():
    """Of 100 tokens 92 are behind the window, in 23 groups, two of them open."""
    report = inspect(tiny.model("llama"), RECALLS["bounds"], 100)[0]
    keys, index = 21 + 2 * 4 + 8, 2 * (2 * 2 * 8 + 2 * 4)
    assert f"a step after them reads {keys * 32 * 2 + 23 * index:,} bytes of it" in report.remark
    assert "all 100 tokens stay on the device, so the cache is larger than a dense one" in report.remark
    assert report.bytes > report.dense_bytes
    # a row of 4 bits is 8 codes, and a step and a zero of 2 bytes
    report = inspect(tiny.model("llama"), STORED["entries-4"], 100)[0]
    assert f"a step after them reads {(2 * 4 + 8) * 32 * 2 + 21 * 4 * 8 + 23 * index:,} bytes of it" in report.remark


def test_a_store_in_host_memory_is_counted_apart():
    """92 tokens in 23 groups; on the device entries, window, index, and slots, each with two numbers of 4 bytes."""
    method = RECALLS["bounds"].replace(store="host", slots=5)
    report, stored = (inspect(tiny.model("llama"), m, 100)[0] for m in (method, RECALLS["bounds"]))
    assert report.host_bytes == 92 * 32 * 2
    assert report.bytes == stored.bytes - 92 * 32 * 2 + 5 * (4 * 32 * 2 + 2 * 8)
    assert report.entries == stored.entries - 92 + 20
    assert "of 100 tokens, 5,888 bytes per layer lie in host memory" in report.remark
    assert stored.host_bytes == 0
