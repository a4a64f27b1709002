"""What `inspect` says in closed form, counted query by query here."""

import pytest
import torch
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


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_flops_and_the_length_from_which_it_pays(name, method):
    model, lengths = tiny.model(name), range(1, 200)
    counted = [flops(name, method, length) for length in lengths]
    dense = [flops(name, condense.Dense(), length) for length in lengths]
    for length in (1, 2, 9, 40, 199):
        report = inspect(model, method, length)[0]
        assert (report.flops, report.dense_flops) == (counted[length - 1], dense[length - 1])
    last = max((length for length in lengths if counted[length - 1] >= dense[length - 1]), default=0)
    assert report.pays_from == (None if last == lengths[-1] else last + 1)


def test_a_billion_tokens():
    report = inspect(tiny.model("llama"), condense.StreamingLLM(sink=4, window=8), 10**9)[0]
    assert report.dense_flops == 10**9 * (10**9 + 1) // 2 * 4 * 2 * 16  # more than 64 bits hold
    assert 8 * 10**9 * 128 < report.flops < 14 * 10**9 * 128


RECALL = {
    "bounds": condense.Recall(group_size=4, window=6, num_recall=3),
    "means-4-drop": condense.Recall(
        group_size=4, window=5, num_recall=2, index="sub_means", index_bits=4, unchosen="drop"
    ),
    "keys' dtype": condense.Recall(group_size=2, window=9, num_recall=1, index_bits=16),
}


@pytest.mark.parametrize("method", RECALL.values(), ids=RECALL)
def test_recall_counts_opened_tokens_and_its_index(method):
    H, D, g, total = 4, 8, method.group_size, 0
    pooled = method.unchosen == "pool"
    for t in range(80):
        closed = max(0, t + 1 - method.window) // g
        opened = min(closed, method.num_recall)
        keys = opened * g + (closed - opened) * pooled + t + 1 - closed * g
        total += keys * H * 2 * 2 * D + closed * method.index_settings.num_rows * H * 2 * D
    groups = (80 - method.window) // g
    assert inspect(tiny.model("llama"), method, 80)[0].flops == total + groups * g * 2 * 2 * 2 * D


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("method", RECALL.values(), ids=RECALL)
def test_recall_says_what_its_cache_holds(name, method):
    model = tiny.model(name).float()
    reports = inspect(model, method, 80, itemsize=4)
    with torch.no_grad(), condense.use(model, method):
        cache = model(torch.randint(2, 60, (1, 80)), use_cache=True).past_key_values
    # each layer keeps counts beside them
    assert 0 <= condense.cache_nbytes(cache) - sum(report.bytes for report in reports) <= 64 * len(reports)
    assert all(report.bytes > report.dense_bytes for report in reports)
