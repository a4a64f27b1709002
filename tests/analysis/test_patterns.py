"""`search_patterns` against a search by hand, and its file as a choice of methods."""

import json
import math

import pytest
import torch
from analysis.test_deviation import ran, run_here
from analyze.patterns import patterns_by_layer, search_patterns, seen_pairs
from models import tiny

import condense
from condense.baselines import AShape
from condense.baselines.blocks import BLOCK
from condense.baselines.minference import pattern_of
from condense.models import attention as models_attention

IDS = tiny.tokens(1, 6 * BLOCK)[0]
BUDGET = AShape(sink=100, window=200)


def watched(monkeypatch):
    seen, stock = {}, models_attention._condensed

    def condensed(call, q, k, v):
        seen[call.module.layer_idx] = (q, k, call.scale)
        return stock(call, q, k, v)

    monkeypatch.setattr(models_attention, "_condensed", condensed)
    return seen


@torch.no_grad()
def test_the_best_of_candidates_that_compute_no_more(monkeypatch):
    model = tiny.model("llama")
    heads = search_patterns(model, IDS, BUDGET)
    assert not condense.models.condensed_layers(model)
    L, block, seen_by = len(IDS), torch.arange(len(IDS)) // BLOCK, watched(monkeypatch)
    with condense.use(model, "dense"):
        model(IDS[None])
    for layer, (q, k, scale) in seen_by.items():
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        weights = (scale * q[0] @ k[0].mT).masked_fill(torch.ones(L, L).triu(1).bool(), -math.inf).softmax(-1)
        most = int(seen_pairs(BUDGET.choose(q[:, :1], k[:, :1], scale=scale), L)[0])
        of_layer = [each for each in heads if each.layer == layer]
        assert [each.head for each in of_layer] == list(range(q.shape[1]))
        for each in of_layer:
            one = slice(each.head, each.head + 1)
            names = [pattern_of(text).name for text in each.kept]
            assert names[0] == "a_shape"
            assert {"vertical_slash", "block_sparse"} <= set(names)
            assert each.kept[each.pattern] == max(each.kept.values())
            for text, kept in each.kept.items():
                method = pattern_of(text)
                keys = method.choose(q[:, one], k[:, one], scale=scale)
                assert each.pairs[text] == int(seen_pairs(keys, L)[0]) / most <= 1
                if method.name == "block_sparse":
                    more = method.replace(blocks=method.blocks + 1).choose(q[:, one], k[:, one], scale=scale)
                    assert int(seen_pairs(more, L)[0]) > most, "the largest that fits"
                seen = keys.blocks[0][block][:, block]
                seen[:, keys.columns[0]] = True
                assert kept == pytest.approx(float((weights[each.head] * seen).sum(-1).mean()), abs=1e-6)


@torch.no_grad()
def test_heads_of_latents_have_patterns_too():
    model = tiny.model("deepseek_v3")
    methods = patterns_by_layer(search_patterns(model, IDS, BUDGET))
    assert {len(method.patterns) for method in methods.values()} == {model.config.num_attention_heads}
    with condense.use(model, methods):
        assert model(IDS[None]).logits.isfinite().all()


def test_the_command_writes_a_choice_of_methods(tmp_path):
    path = tmp_path / "patterns.json"
    settings = ("--length", "512", "--sink", "32", "--window", "96", "--output", str(path))
    done = ran("patterns", *settings)
    assert f"--method @{path}" in done.stdout
    saved = json.loads(path.read_text())
    model, tokenizer = condense.demo_model()
    condense.apply(model, f"@{path}")
    heads = saved["patterns"]["heads"]
    for layer, method in condense.models.condensed_layers(model).items():
        assert list(method.patterns) == [each["pattern"] for each in heads if each["layer"] == layer]
    again = run_here("patterns", *settings)
    assert again.returncode == 2
    assert "wanted a path that does not exist yet" in again.stderr
    short = run_here("patterns", "--length", "200", "--output", str(tmp_path / "short.json"))
    assert short.returncode == 2
    assert "take a longer text or a smaller sink and window" in short.stderr
