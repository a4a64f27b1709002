"""Shapes, the work that rows are held against, ratios and crossovers of rows, and FlexAttention with our mask."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from layers import read_request
from oracles import cases, oracle, oracle_recall
from speed import baselines
from speed.problems import HeadShape, Setting, beside_keys, pooled, step_bytes, visible_pairs
from speed.rows import crossover, speedups
from two_sources import attend_to

import condense
from condense.ops.recall import StoreFormat

CROSSOVERS = [
    ({10: 0.5, 100: 2.0, 1000: 12.5}, 100), ({10: 2.0, 100: 2.0}, 10), ({10: 2.0, 100: 0.9}, None),
    ({10: 2.0, 100: 0.9, 1000: 1.0}, 1000), ({}, None),
]  # fmt: skip
SETTING = Setting(HeadShape(4, 2, 8, 6), batch=1, dtype=torch.float32, device=torch.device("cpu"), seed=0)
# for FlexAttention, uncompiled
WIDE = Setting(HeadShape(4, 2, 16, 16), 1, torch.float64, torch.device("cpu"), 0)
MASKED = {
    "dense": condense.Dense(),
    "cca": condense.CCA(group_size=4, window=100),
    "log_size": condense.CCA(group_size=2, window=1, rep_bias="log_size"),
    "streaming_llm": condense.StreamingLLM(sink=4, window=130),
}
COUNTED = cases.PLANS | cases.SELECTIONS
RECALL = {name: cases.RECALLS[name] for name in ("two-open", "drop")}


def row(runner, length, ms, *, op="forward", condensed=False, mask=None):
    times = None if ms is None else {"median_ms": ms}
    return {"op": op, "runner": runner, "condensed": condensed, "mask": mask, "length": length, "times": times}


def test_ratios_are_to_baselines_of_the_same_length_and_mask():
    rows = [row("cudnn", 8, 10.0), row("flash", 8, None), row("cudnn", 16, 99.0), row("cudnn", 8, 77.0, op="decode")]
    rows += [row("flex_mask", 8, 3.0, mask="a"), row("flex_mask", 8, 7.0, mask="b")]
    ours = partial(row, "ours", condensed=True, mask="a")
    rows += [ours(8, 2.0), ours(8, 4.0, op="layer"), ours(16, None)]
    ratios = [speedups(r, rows, "times") for r in rows if r["condensed"]]
    # the layer makes its entries, FlexAttention got them
    assert ratios == [{"cudnn": 5.0, "flex_mask": 1.5}, {"cudnn": 2.5}, {}]


@pytest.mark.parametrize(("ratios", "length"), CROSSOVERS)
def test_crossover_is_where_it_stays_faster(ratios, length):
    assert crossover(ratios) == length


def test_shapes_are_read():
    assert HeadShape.parse("64/4") == HeadShape.parse("64/4/128/128") == HeadShape(64, 4, 128, 128)
    assert HeadShape.parse("4/4/192") == HeadShape(4, 4, 192, 192)


@pytest.mark.parametrize("method", COUNTED.values(), ids=COUNTED)
def test_visible_pairs_are_counted_as_the_definition_does(method):
    inputs = SETTING.inputs(37)
    sources = pooled(method, inputs)
    q, k = inputs.q.double().unflatten(1, (2, 2)), inputs.k.double()
    want = sum(sum(oracle.num_visible(method, q[0, head], k[0, head], inputs.scale)) for head in range(2))
    assert visible_pairs(method, sources, 37) == round(want / 2)


@pytest.mark.parametrize("method", RECALL.values(), ids=RECALL)
def test_recall_counts_open_groups_as_tokens_and_reads_the_index(method):
    inputs = SETTING.inputs(37)
    sources = pooled(method, inputs)
    q, k, v = inputs.q[0, :2], inputs.k[0, 0], inputs.v[0, 0]
    seen = [len(oracle_recall.seen(method, q, k, v, t, 1.0)) for t in range(37)]
    assert visible_pairs(method, sources, 37) == sum(seen)
    kept = sum(x[0, 0].nbytes for x in sources.extra[:2])
    # a sum in float64 in place of a key and a value in float32
    kept += 6 * 8 - 4 * (8 + 6) if method.unchosen == "mean" else 0
    assert kept == beside_keys(method, SETTING, sources.entries.k.shape[2]) > 0


def test_entries_in_fewer_bits_are_read_as_such():
    cca, recall = condense.CCA(group_size=4, window=8, entry_bits=8), RECALL["two-open"]
    form = condense.methods.step_settings(cca).entry_format
    saved = 4 * (8 + 6) - sum(form.pack(torch.randn(1, 1, 1, width)).nbytes for width in (8, 6))
    assert beside_keys(cca, SETTING, 5) == -5 * saved
    index = beside_keys(recall, SETTING, 5)
    # the tokens of open groups: rows of bytes that hold codes, and steps and zeros of the group
    g, row = recall.group_size, StoreFormat(8, recall.group_size).width(8, 6, 4)
    assert beside_keys(recall.replace(store_bits=8), SETTING, 5) == index - 2 * g * (4 * (8 + 6) - row)


@pytest.mark.parametrize("method", cases.PLANS.values(), ids=cases.PLANS)
def test_a_step_reads_what_its_query_sees(method):
    inputs = SETTING.inputs(38)
    q, k, v = (x[:, :, :-1] for x in inputs)
    cache = condense.caches.CondensedLayer(method)
    cache.read(k, v, read_request(q, scale=1.0))
    q, k, v = (x[:, :, -1:] for x in inputs)
    real = cache.read(k, v, read_request(q, scale=1.0))
    keys = oracle.num_visible(method, inputs.k[0, :1], inputs.k[0, 0], 1.0)[-1]
    assert visible_pairs(method, real, 1) == keys
    assert step_bytes(SETTING, keys, 5) == 4 * (keys * 2 * (8 + 6) + 4 * (8 + 6)) + 2 * 5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("length", [256, 300])
@pytest.mark.parametrize("method", MASKED.values(), ids=MASKED)
def test_flex_attention_with_our_mask_is_ours_and_reads_the_blocks_that_somebody_sees(method, length, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    inputs = WIDE.inputs(length)
    sources = pooled(method, inputs)
    attend = baselines.flex_attention(sources, length, scale=inputs.scale)
    want = attend_to(sources, inputs.q, scale=inputs.scale)[0]
    # the bias is float32 there
    torch.testing.assert_close(attend(inputs.q, *baselines.joined_keys(sources)), want, rtol=0, atol=1e-6)
    mask = baselines.block_mask(sources, length)
    size, M = baselines.FLEX_BLOCK, sources.entries.k.shape[2]
    P = M + -M % size
    seen = torch.zeros(length, P + length)
    for t in range(length):
        groups, exact = oracle.visible(method, t)
        if method.name == "streaming_llm" and len(exact) <= t:
            # what drops tokens keeps its first ones as entries of their own
            groups, exact = exact[:M], exact[M:]
        seen[t, list(groups)] = 1
        seen[t, [P + i for i in exact]] = 1
    padded = F.pad(seen, (0, -seen.shape[1] % size, 0, -length % size))
    wanted = padded.unflatten(0, (-1, size)).unflatten(2, (-1, size)).amax((1, 3))
    assert torch.equal(mask.to_dense()[0, 0].float(), wanted)
