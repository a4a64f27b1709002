"""`python benchmarks/speed` as a user meets it, on the CPU."""

import functools
import json
from pathlib import Path

import pytest
from cli import test_commands
from small_models import tiny_llama
from speed import tasks
from speed.command import main
from transformers import LlamaForCausalLM

import condense

ran, refused, run_here = (
    functools.partial(each, entry=main) for each in (test_commands.ran, test_commands.refused, test_commands.run_here)
)
KERNEL = ("kernel", "--device", "cpu", "--shape", "4/2/16/16", "--budget", "0", "--method=cca:window=16")
BAD = [
    (("kernel", "--shape", "32/5"), "shape must be H/Hkv/D/Dv"),
    (("kernel", "--lengths", "0"), "lengths: wanted a number of tokens >= 1"),
    (("kernel", "--baselines", "fastest"), "baselines must be of cudnn"),
    (("kernel", "--batch", "0"), "batch must be an integer >= 1"),
    (("kernel", "--decode-batches", "4,x"), "decode_batches must be numbers of rows >= 1"),
    (("kernel", "--backend", "torch,abacus"), "backend must be"),
    (("kernel", "--method=dga:selection=prompt", "--ops=decode", "--baselines=none"), "ops: none of decode"),
    (("kernel", "--results", "file"), "results: wanted a path that can be written"),
    (("model", "--shape", "llama-9"), "shape must be one of llama-3.1-8b"),
    (("model", "--runners", "fast"), "runners must be of dense"),
    (("model", "--steps", "0"), "steps must be an integer >= 1"),
    (("model", "--shape", "llama-3.1-8b", "--model", "x"), "shape and model exclude each other"),
    (("model", "--layers", "2", "--model", "x"), "layers belongs to a shape"),
]


def rows_of(path):
    return json.loads(path.read_text())["results"]["rows"]


def test_kernel_prints_and_writes_what_it_measured(tmp_path):
    words = ["--lengths", "64,128", "--ops", "layer,decode", "--decode-batches", "1,2", "--backend", "torch,reference"]
    recall = "--method=recall:group_size=4,window=8,num_recall=2"
    done = ran(*KERNEL, recall, *words, "--results", str(tmp_path / "results"))
    assert "no claims" in done.stdout
    assert "backend torch, reference" in done.stdout
    assert "attention of one decode step, 2 rows at once" in done.stdout
    assert "faster than every dense baseline: " in done.stdout
    (path,) = (tmp_path / "results").iterdir()
    rows = [row for row in rows_of(path) if row["condensed"]]
    assert all(row["gate"]["passed"] for row in rows)


def test_a_wrong_kernel_is_exit_code_1(tmp_path, monkeypatch):
    def wrong(*arguments, **options):
        return condense.attention(*arguments, **options) * 1.01

    monkeypatch.setattr(tasks, "attention", wrong)
    done = run_here(*KERNEL, "--lengths", "64", "--ops", "layer", "--results", str(tmp_path))
    assert done.returncode == 1
    assert "times the budget, not timed" in done.stdout
    (path,) = tmp_path.iterdir()
    (row,) = (row for row in rows_of(path) if row["condensed"])
    assert "times" not in row


def test_model_runs_a_saved_model_as_it_was_saved(tmp_path):
    model, saved = tiny_llama(vocab_size=64, num_key_value_heads=1), tmp_path / "tiny"
    condense.apply(model, condense.CCA(group_size=4, window=8), layers=[1]).save_pretrained(saved)
    command = ["model", "--device", "cpu", "--lengths", "48", "--steps", "2", "--runners", "dense,condensed"]
    command += ["--prefill-chunk", "20"]
    done = ran(*command, "--model", str(saved), "--results", str(tmp_path / "layer"))
    assert "time per further token" in done.stdout
    (path,) = (tmp_path / "layer").iterdir()
    assert json.loads(path.read_text())["results"]["prefill_chunk"] == 20
    dense, condensed = rows_of(path)
    method = condense.CCA(group_size=4, window=8)
    assert condensed["runner"] == "condensed CCA(group_size=4, window=8) in layers 1"
    assert condensed["method"] == {"1": method.to_dict()}
    assert condensed["gate"]["passed"]
    assert dense["cache_bytes"] / 2 < condensed["cache_bytes"] < dense["cache_bytes"]
    model = condense.apply(LlamaForCausalLM.from_pretrained(saved), condense.LCA(group_size=4, window=8))
    by_method = ("--method", "cca:group_size=4,window=8")
    for name, given, expected in (
        ("whole", (), "LCA(group_size=4, window=8)"), ("stock", (), "recall-device"), ("own", by_method, by_method[1]),
    ):  # fmt: skip
        model.save_pretrained(tmp_path / name)
        ran(*command, *given, "--model", str(tmp_path / name), "--results", str(tmp_path / "results" / name))
        (path,) = (tmp_path / "results" / name).iterdir()
        assert [row["runner"] for row in rows_of(path)] == ["dense", f"condensed {expected}"]
        condense.restore(model)


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda x: "_".join(x) if isinstance(x, tuple) else "")
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    refused(message, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
