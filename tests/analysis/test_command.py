"""`python benchmarks/analyze deviation` as a user meets it; the other commands' tests stand beside their functions'."""

import functools
import json
import shutil

import pytest
from analyze import report
from analyze.command import main
from cli import test_commands
from transformers import LlamaForCausalLM

import condense

saved, story = test_commands.saved, test_commands.story  # fixtures
ran, refused, run_here = (
    functools.partial(each, entry=main) for each in (test_commands.ran, test_commands.refused, test_commands.run_here)
)
NAMES = [
    (["a/notes.txt", "b/story.txt"], ["notes", "story"]),
    (["a/notes.txt", "a/notes.md"], ["notes.txt", "notes.md"]),
    (["essays/chapter-one.txt", "b/chapter-one.txt"], ["essays/chapter-one.txt", "b/chapter-one.txt"]),
    (["b/notes.txt", "b/../b/notes.txt"], ["b/notes.txt", "../b/notes.txt"]),
]


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
