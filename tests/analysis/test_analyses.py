"""Analyses against distances, searches, weights and a cache of groups by hand; what they refuse, and their commands."""

import functools
import json
import math
import shutil
from collections import defaultdict

import pytest
import torch
from analyze.command import main
from analyze.deviation import measure_deviation, stretches
from analyze.patterns import patterns_by_layer, search_patterns, seen_pairs
from analyze.recall import measure_recall
from cli import test_commands
from models import tiny
from oracles import latent_oracle, oracle
from transformers import LlamaForCausalLM

import condense
from condense.baselines import AShape
from condense.baselines.blocks import BLOCK
from condense.baselines.minference import pattern_of
from condense.methods import Recall
from condense.models import attention as models_attention
from condense.models import condensed_layers

saved, story = test_commands.saved, test_commands.story  # fixtures
ran, refused, run_here = (
    functools.partial(each, entry=main) for each in (test_commands.ran, test_commands.refused, test_commands.run_here)
)
IDS = tiny.tokens(1, 150)[0]
G, W = 4, 8
METHODS = {
    "lca": condense.LCA(group_size=G, window=W),
    "last": condense.CCA(group_size=G, window=W),
    "mean-max": condense.CCA(group_size=G, window=W, key_pooling="mean", value_pooling="max"),
}
BAD = {
    "baseline": ("llama", {"method": condense.Dense()}, r"method must pool groups of tokens, such as condense.LCA\(\)"),
    "too short": ("llama", {"lengths": [11]}, "length must be such that LCA.* condenses something, got 11"),
    "too long": ("llama", {"lengths": [200]}, "length must be at most the 150 tokens of a, got 200"),
    "layers": ("llama", {"layers": [3]}, "layers must be indices from 0 to 2"),
    "positions": ("gpt2", {"lengths": [140]}, "length must fit the model's 128 learned positions, got 140"),
}
LONG = tiny.tokens(1, 6 * BLOCK)[0]
BUDGET = AShape(sink=100, window=200)
TEXT = tiny.tokens(1, 90)[0]
STEPS = 12
METHOD = condense.Recall(group_size=4, window=8, num_recall=3)
UNMEASURED = {
    "method": ("llama", condense.CCA(), 90, "condense.Recall"),
    "short": ("llama", METHOD, 20, "closes a group before"),
    "long": ("llama", METHOD, 91, "at most that of the longest text"),
    "latents": ("deepseek_v3", METHOD, 90, "latents"),
}


def _pairs(method, call, q, k, v, *rest):
    closed, scale = (q.shape[2] - W) // G, call.scale
    for b in range(len(q)):
        if rest:
            (entries,) = rest
            c, k_rope = entries[b, 0].split([12, 4], -1)
            weight = call.module.kv_b_proj.weight.unflatten(0, (4, 14))
            w_uk, w_uv = weight[:, :8].mT, weight[:, 8:].mT
            for j in range(closed):
                summary = q[b][:, list(oracle.summary_positions(method, j, q.shape[2]))].mean(1)
                rep_c, rep_k = latent_oracle.representative(method, j, summary, c, k_rope, w_uk, scale)
                for i in range(j * G, (j + 1) * G):
                    for h in range(4):
                        yield k[b, h, i], torch.cat([rep_c @ w_uk[h], rep_k]), v[b, h, i], rep_c @ w_uv[h]
        else:
            for h in range(k.shape[1]):
                qbar = q[b].unflatten(0, (k.shape[1], -1))[h].mean(0)
                for j in range(closed):
                    rep_k, rep_v, _ = oracle.entry(method, j, qbar, k[b, h], v[b, h], scale)
                    for i in range(j * G, (j + 1) * G):
                        yield k[b, h, i], rep_k, v[b, h, i], rep_v


def watched(monkeypatch, name="_condensed"):
    """The calls of a function of attention from now on, by layer, with their tensors."""
    seen, stock = defaultdict(list), getattr(models_attention, name)

    def noted(call, *tensors):
        seen[call.module.layer_idx].append((call, *tensors))
        return stock(call, *tensors)

    monkeypatch.setattr(models_attention, name, noted)
    return seen


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_distances_one_by_one(monkeypatch, name, method):
    model, steps = tiny.model(name), []
    seen = watched(monkeypatch, {"llama": "_condensed", "deepseek_v3": "condensed_latents"}[name])
    (result,) = measure_deviation(model, method, {"a": IDS}, [30], sequences=3, on_step=lambda: steps.append(1))
    assert (result.text, result.length, result.sequences, len(steps)) == ("a", 30, 3, 3)
    assert result.tokens == 3 * 20
    assert condensed_layers(model) == {}
    assert [layer.layer for layer in result.layers] == [0, 1, 2]
    for layer in result.layers:
        rows = [row for of_call in seen[layer.layer] for row in _pairs(method, *of_call)]
        for part, exact, pooled in ((layer.keys, 0, 1), (layer.values, 2, 3)):
            norms = torch.stack([row[exact].norm() for row in rows])
            distances = torch.stack([(row[exact] - row[pooled]).norm() for row in rows])
            got = torch.tensor([part.norm, part.deviation, part.relative, part.largest], dtype=torch.float64)
            want = torch.stack([norms.mean(), distances.mean(), distances.mean() / norms.mean(), distances.max()])
            torch.testing.assert_close(got, want.detach(), rtol=1e-10, atol=1e-10)
    assert result.keys.largest == max(layer.keys.largest for layer in result.layers)
    assert abs(result.values.deviation - sum(layer.values.deviation for layer in result.layers) / 3) < 1e-12


def test_stretches_spread_and_do_not_overlap():
    ids = torch.arange(100)
    parts = stretches(ids, 30, 8)
    assert [int(part[0]) for part in parts] == [0, 35, 70]
    assert all(len(part) == 30 for part in parts)
    assert [int(part[0]) for part in stretches(ids, 30, 2)] == [0, 70]
    assert [int(part[0]) for part in stretches(ids, 100, 8)] == [0]


@pytest.mark.parametrize(("name", "changes", "message"), BAD.values(), ids=BAD)
def test_refusals(name, changes, message):
    arguments = {"method": METHODS["lca"], "texts": {"a": IDS}, "lengths": [60]} | changes
    tiny.refused(message, measure_deviation, tiny.model(name), **arguments)
    model = condense.apply(tiny.model(name), tiny.CCA)
    tiny.refused("model must have stock attention", measure_deviation, model, METHODS["lca"], {"a": IDS}, [60])


def test_deviation_of_two_texts(saved, story, tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text(story.read_text()[2000:], encoding="utf-8")
    results, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = ["--length", "64", "--length", "200", "--sequences", "2", "--method", "lca:group_size=4,window=8"]
    files = ("--text", str(story), "--text", str(other), "--json", str(results), "--plot", str(picture))
    done = ran("deviation", "--model", str(saved), *words, *files)
    assert "story" in done.stdout
    assert "…" not in done.stdout
    found = json.loads(results.read_text())["results"]["deviations"]
    assert [(r["text"], r["length"]) for r in found] == [(t, n) for t in ("story", "notes") for n in (64, 200)]
    assert all(r["keys"]["relative"] > 0 and len(r["layers"]) == 2 for r in found)
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused("method must pool groups of tokens", "deviation", "--method", "dense")


def test_deviation_reads_as_the_model_was_saved(saved, story, tmp_path):
    model, results = LlamaForCausalLM.from_pretrained(saved), tmp_path / "out.json"

    options = ("deviation", "--text", str(story), "--length", "64", "--json", str(results), "--overwrite", "--model")
    assert "LCA(group_size=4, window=8) in layers 1:" in " ".join(ran(*options, str(saved)).stdout.split())
    found = json.loads(results.read_text())["results"]
    assert found["method"] == {"1": condense.LCA(group_size=4, window=8).to_dict()}
    assert [layer["layer"] for layer in found["deviations"][0]["layers"]] == [1]
    whole = shutil.copytree(saved, tmp_path / "whole")
    condense.apply(model, condense.CCA(group_size=4, window=4)).save_pretrained(whole)
    ran(*options, str(whole))
    assert json.loads(results.read_text())["results"]["method"] == condense.CCA(group_size=4, window=4).to_dict()
    condense.apply(model, condense.StreamingLLM(), layers=[0])
    for _ in ("beside another method", "alone"):
        model.save_pretrained(whole)
        refused("the model was saved with StreamingLLM() in layers 0", *options, str(whole))
        condense.apply(condense.restore(model), condense.StreamingLLM(), layers=[0])


@torch.no_grad()
def test_the_best_of_candidates_that_compute_no_more(monkeypatch):
    model = tiny.model("llama")
    heads = search_patterns(model, LONG, BUDGET)
    assert not condense.models.condensed_layers(model)
    L, block, seen_by = len(LONG), torch.arange(len(LONG)) // BLOCK, watched(monkeypatch)
    with condense.use(model, "dense"):
        model(LONG[None])
    for layer, ((call, q, k, _),) in seen_by.items():
        scale = call.scale
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
    methods = patterns_by_layer(search_patterns(model, LONG, BUDGET))
    assert {len(method.patterns) for method in methods.values()} == {model.config.num_attention_heads}
    with condense.use(model, methods):
        assert model(LONG[None]).logits.isfinite().all()


def test_the_command_writes_a_choice_of_methods(tmp_path):
    path = tmp_path / "patterns.json"
    settings = ("--length", "512", "--sink", "32", "--window", "96", "--output", str(path))
    assert f"--method @{path}" in ran("patterns", *settings).stdout
    saved = json.loads(path.read_text())
    model, tokenizer = condense.demo_model()
    condense.apply(model, f"@{path}")
    heads = saved["patterns"]["heads"]
    for layer, method in condense.models.condensed_layers(model).items():
        assert list(method.patterns) == [each["pattern"] for each in heads if each["layer"] == layer]
    refused("wanted a path that does not exist yet", "patterns", *settings)
    short = ("--length", "200", "--output", str(tmp_path / "short.json"))
    refused("take a longer text or a smaller sink and window", "patterns", *short)


def test_shares_of_recall_token_by_token_and_hits(monkeypatch):
    """Held to q, k and the open groups of every layer as attention itself had them."""
    seen, opened, attend = watched(monkeypatch), {}, Recall.attend

    def spy(self, q, context, *, scale, **kwargs):
        closed = context.spans.at(0, q.shape[2], q.device)[0].hi
        index = condense.ops.recall.GroupIndex(*context.extra[:2])
        choice = condense.ops.recall.IndexChoice(q, index, scale, self.quota)
        opened[len(opened)] = choice.at(0, q.shape[2], closed, index.signs.shape[2])[0]
        return attend(self, q, context, scale=scale, **kwargs)

    monkeypatch.setattr(Recall, "attend", spy)
    reports = measure_recall(tiny.model("llama"), METHOD, [TEXT], len(TEXT), steps=STEPS, slots=(3, 5))
    assert [report.layer for report in reports] == list(range(tiny.NUM_LAYERS))
    for report in reports:
        call, q, k, _ = seen[report.layer][-1]
        scale, H, K, L = call.scale, q.shape[1], k.shape[1], len(TEXT)
        window, exact = torch.zeros(H), torch.zeros(H)
        for t in range(L - STEPS, L):
            closed = (t + 1 - 8) // 4
            for h in range(H):
                head = h // (H // K)
                weights = (scale * k[0, head, : t + 1] @ q[0, h, t]).softmax(0)
                window[h] += float(weights[closed * 4 :].sum()) / STEPS
                for j in opened[report.layer][head, t].nonzero()[:, 0].tolist():
                    exact[h] += float(weights[j * 4 : j * 4 + 4].sum()) / STEPS
        assert report.window == pytest.approx(float(window.mean()), abs=1e-6)
        assert report.opened == pytest.approx(float(exact.mean()), abs=1e-6)
        assert report.window + report.opened + report.pooled == pytest.approx(1)
        assert list(report.heads) == pytest.approx((window + exact).tolist(), abs=1e-6)
        assert report.best >= report.opened - 1e-9 or q.shape[1] > k.shape[1]
        # with slots for one step's groups, a hit of a replayed cache is a group that the step before opened
        rows = opened[report.layer][:, -STEPS:]
        assert report.hits[3] == pytest.approx(float((rows[:, 1:] & rows[:, :-1]).sum() / rows[:, 1:].sum()))
        assert report.hits[5] >= report.hits[3]


@pytest.mark.parametrize(("name", "method", "length", "said"), UNMEASURED.values(), ids=UNMEASURED)
def test_what_measuring_recall_refuses(name, method, length, said):
    tiny.refused(said, measure_recall, tiny.model(name), method, [TEXT], length, steps=STEPS)


def test_the_command_that_measures_recall(tmp_path):
    words = ["recall", "--length", "300", "--steps", "8", "--method", "recall:window=64,num_recall=4"]
    assert "lowest head" in " ".join(ran(*words, "--json", str(tmp_path / "out.json")).stdout.split())
    assert (tmp_path / "out.json").exists()
