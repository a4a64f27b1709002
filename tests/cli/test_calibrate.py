"""`condense calibrate`: its files, other commands that read them, and what it refuses."""

import json

import pytest
import torch
from cli.test_commands import ran, refused, run_here
from small_models import saved_with_tokenizer, tiny_llama
from transformers import LlamaForCausalLM

import condense
from condense.models import condensed_layers

UNCALIBRATED = [
    (("--output", "."), "output: wanted a path that does not exist yet"),
    (("--output", "a.json", "--measured", "./a.json"), "measured must be another file than output"),
    (("--measured", "."), "measured: wanted a file, got the folder"),
    (("--plot", "a.txt"), "plot must end in one of"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = condense.apply(tiny_llama(num_hidden_layers=3), condense.CCA(group_size=4, window=8))
    return saved_with_tokenizer(model, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def allocation(saved, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "a.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "60")
        words = ["--budget-nats", "1", "--length", "160", "--texts", "2", "--hidden-numbers", "1", "--min-found", "0"]
        words += ["--candidate=dense", "--candidate=cca:window=16"]
        words += ["--candidate=recall:window=16,num_recall=2,store=host,slots=2"]
        files = ("--output", str(path), "--plot", str(path.with_suffix(".png")))
        done = ran("calibrate", "--model", str(saved), *words, *files)
    assert "forwards of 160 tokens" in done.stderr
    assert f"{path.with_suffix('.measured.json')} keeps what is measured\n" in done.stderr
    assert f"written: {path}" in done.stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout  # no figure is cut off
    kept = json.loads(path.read_text())["calibration"]["chosen"]["cache"]
    assert f"chosen, {kept:.1%} of the dense cache: " in done.stdout
    for said in ("each layer alone", "quality against cache at 160 tokens", "found", "on held-out text: loses"):
        assert said in done.stdout
    assert "fewer than" not in done.stdout
    return path


def test_the_files_of_a_calibration(saved, allocation):
    content = json.loads(allocation.read_text())
    assert sorted(i for part in content["methods"] for i in part["layers"]) == [0, 1, 2]
    assert content["calibration"]["provenance"]["torch"] == torch.__version__
    assert allocation.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(allocation.with_suffix(".measured.json").read_text())["readings"]
    model = condense.apply(condense.restore(LlamaForCausalLM.from_pretrained(saved)), f"@{allocation}")
    assert set(condensed_layers(model)) == {0, 1, 2}


def test_commands_read_the_allocation(saved, allocation, tmp_path):
    options = ("--model", str(saved), "--method", f"@{allocation}")
    methods = {i: part["method"] for part in json.loads(allocation.read_text())["methods"] for i in part["layers"]}
    results = tmp_path / "layers.json"
    ran("inspect", *options, "--length", "1000", "--json", str(results))
    layers = json.loads(results.read_text())["results"]["layers"]
    assert [layer["method"] for layer in layers] == [methods[i] for i in range(3)]
    ran("generate", "A walk", *options, "--max-new-tokens", "2")


def test_too_few_numbers_in_a_size_are_said(tmp_path):
    words = ["calibrate", "--cache", "0.3", "--length", "160", "--texts", "2", "--hidden-numbers", "2"]
    done = ran(*words, "--candidate=dense", "--candidate=streaming_llm:window=16", "--output", str(tmp_path / "a.json"))
    assert "fewer than 99% of the numbers that dense attention finds: 0 of" in done.stdout


def test_a_copy_of_a_text_is_not_held_out(saved, tmp_path):
    lines = condense.demo.demo_text().text.splitlines()[:40]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    texts = ("--text", str(tmp_path / "a.txt"), "--text", str(tmp_path / "b.txt"))
    done = run_here("calibrate", "--model", str(saved), *texts, "--output", str(tmp_path / "a.json"))
    once = run_here("calibrate", "--model", str(saved), *texts[:2], "--output", str(tmp_path / "a.json"))
    assert "text must have" in done.stderr
    assert done.stderr == once.stderr


@pytest.mark.parametrize(("arguments", "said"), UNCALIBRATED, ids=lambda x: "" if isinstance(x, str) else x[0])
def test_bad_input_of_calibrate_is_one_line(saved, tmp_path, arguments, said):
    output = () if "--output" in arguments else ("--output", str(tmp_path / "a.json"))
    refused(said, "calibrate", "--model", str(saved), *output, *arguments)
    assert not list(tmp_path.iterdir())
