"""`measure_deviation` against distances taken one by one, what it refuses, and its command."""

import functools
import json
import shutil

import pytest
import torch
from analyze import report
from analyze.command import main
from analyze.deviation import measure_deviation, stretches
from cli import test_commands
from models import tiny
from oracles import latent_oracle, oracle
from transformers import LlamaForCausalLM

import condense
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
    "no sequences": ("llama", {"sequences": 0}, "sequences must be an integer >= 1"),
    "layers": ("llama", {"layers": [3]}, "layers must be indices from 0 to 2"),
    "positions": ("gpt2", {"lengths": [140]}, "length must fit the model's 128 learned positions, got 140"),
}
NAMES = [
    (["a/notes.txt", "b/story.txt"], ["notes", "story"]),
    (["a/notes.txt", "a/notes.md"], ["notes.txt", "notes.md"]),
    (["essays/chapter-one.txt", "b/chapter-one.txt"], ["essays/chapter-one.txt", "b/chapter-one.txt"]),
    (["b/notes.txt", "b/../b/notes.txt"], ["b/notes.txt", "../b/notes.txt"]),
]


def _pairs(method, call, q, k, v, *rest):
    """Per head the exact keys and values of the tokens in closed groups, and those of their representatives."""
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
                    rep_k, rep_v = oracle.representative(method, j, qbar, k[b, h], v[b, h], scale)
                    for i in range(j * G, (j + 1) * G):
                        yield k[b, h, i], rep_k, v[b, h, i], rep_v


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_distances_one_by_one(monkeypatch, name, method):
    model = tiny.model(name)
    found = {}

    def watch(kind):
        real = getattr(models_attention, kind)

        def record(call, *tensors):
            found.setdefault(call.module.layer_idx, []).extend(_pairs(method, call, *tensors))
            return real(call, *tensors)

        monkeypatch.setattr(models_attention, kind, record)

    watch("_condensed")
    watch("condensed_latents")
    steps = []
    (result,) = measure_deviation(model, method, {"a": IDS}, [30], sequences=3, on_step=lambda: steps.append(1))
    assert (result.text, result.length, result.sequences, len(steps)) == ("a", 30, 3, 3)
    assert result.tokens == 3 * 20
    assert condensed_layers(model) == {}
    assert [layer.layer for layer in result.layers] == [0, 1, 2]
    for layer in result.layers:
        rows = found[layer.layer]
        for part, exact, pooled in ((layer.keys, 0, 1), (layer.values, 2, 3)):
            norms = torch.stack([row[exact].norm() for row in rows])
            distances = torch.stack([(row[exact] - row[pooled]).norm() for row in rows])
            got = torch.tensor([part.norm, part.deviation, part.relative, part.largest], dtype=torch.float64)
            want = torch.stack([norms.mean(), distances.mean(), distances.mean() / norms.mean(), distances.max()])
            torch.testing.assert_close(got, want.detach(), rtol=1e-10, atol=1e-10)
    assert result.keys.largest == max(layer.keys.largest for layer in result.layers)
    mean = sum(layer.values.deviation for layer in result.layers) / 3
    assert abs(result.values.deviation - mean) < 1e-12


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
    with pytest.raises(ValueError, match=message):
        measure_deviation(tiny.model(name), **arguments)


def test_condensed_models_are_refused():
    with pytest.raises(ValueError, match="model must have stock attention"):
        measure_deviation(condense.apply(tiny.model("llama"), tiny.CCA), METHODS["lca"], {"a": IDS}, [60])


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

    def analyze(path):
        options = ("--text", str(story), "--length", "64", "--json", str(results), "--overwrite")
        return run_here("deviation", "--model", str(path), *options)

    done = analyze(saved)
    assert done.returncode == 0, done.stderr
    assert "LCA(group_size=4, window=8) in layers 1:" in " ".join(done.stdout.split())
    found = json.loads(results.read_text())["results"]
    assert found["method"] == {"1": condense.LCA(group_size=4, window=8).to_dict()}
    assert [layer["layer"] for layer in found["deviations"][0]["layers"]] == [1]
    whole = shutil.copytree(saved, tmp_path / "whole")
    condense.apply(model, condense.CCA(group_size=4, window=4)).save_pretrained(whole)
    assert analyze(whole).returncode == 0
    assert json.loads(results.read_text())["results"]["method"] == condense.CCA(group_size=4, window=4).to_dict()
    condense.apply(model, condense.StreamingLLM(), layers=[0])
    for kind in ("several", "one"):
        model.save_pretrained(whole)
        done = analyze(whole)
        assert done.returncode == 2, kind
        assert "the model was saved with StreamingLLM() in layers 0" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        condense.apply(condense.restore(model), condense.StreamingLLM(), layers=[0])


@pytest.mark.parametrize(("files", "names"), NAMES)
def test_names_tell_all_texts_apart(files, names):
    assert report._names(files) == names
