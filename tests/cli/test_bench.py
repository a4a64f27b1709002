"""`condense bench` as a user meets it, on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from cli.test_commands import run_here
from transformers import LlamaConfig, LlamaForCausalLM

import condense
from condense.bench import tasks

KERNEL = ("bench", "kernel", "--device", "cpu", "--shape", "4/2/16/16", "--budget", "0", "--method=cca:window=16")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "tiny"
    condense.apply(LlamaForCausalLM(config), condense.CCA(group_size=4, window=8), layers=[1]).save_pretrained(path)
    return path


def rows_of(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())["results"]["rows"]


def test_kernel_compares_with_the_last_result(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    command = (*KERNEL, "--lengths", "64,128", "--decode-batches", "1,2", "--results", str(folder))
    done = run_here(*command)
    assert done.returncode == 0, done.stderr
    assert "no claims" in done.stdout
    assert "attention of one decode step, 2 rows at once" in done.stdout
    assert "change" not in done.stdout
    (first,) = folder.iterdir()
    # names carry the second
    first = first.rename(first.with_name(first.name.replace("-20", "-19", 1)))
    done = run_here(*command)
    assert done.returncode == 0, done.stderr
    assert f"since {first.name}" in done.stdout
    (second,) = set(folder.iterdir()) - {first}
    for old, new in zip(rows_of(first), rows_of(second), strict=True):
        if "times" in old:
            ratio = new["times"]["median_ms"] / old["times"]["median_ms"]  # type: ignore[index]
            assert new["change"] == {"times": pytest.approx(ratio)}


def test_report_fills_a_page_and_draws_its_pictures(tmp_path: Path) -> None:
    folder, page = tmp_path / "results", tmp_path / "page.md"
    method = "recall:group_size=4,window=8,num_recall=2"
    options = ("--method", method, "--lengths", "64", "--ops", "forward,decode", "--baselines", "sdpa")
    done = run_here(*KERNEL, *options, "--results", str(folder))
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    assert all(row["gate"]["passed"] for row in rows_of(path) if row["condensed"])  # type: ignore[index]
    name = path.stem.removeprefix("bench-").rpartition("-")[0]
    row = f"Recall = {name} decode {method} / sdpa"
    page.write_text(f"Before.\n<!-- bench: a step | 64 | step.png\n{row}\n-->\n<!-- /bench -->\nAfter.\n")
    command = ("bench", "report", str(page), "--results", str(folder))
    assert run_here(*command).returncode == 0
    assert "| Recall | " in page.read_text()
    assert not (tmp_path / "step.png").exists()
    assert run_here(*command, "--plots").returncode == 0
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_kernel_times_a_prompt_read_at_once_with_both_backends(tmp_path: Path) -> None:
    prompt = "dga:selection=prompt,min_focal=10"
    done = run_here(
        *KERNEL, f"--method={prompt}", "--lengths", "64", "--backend", "torch,reference", "--baselines", "none",
        "--results", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "backend torch, reference" in done.stdout
    assert "of its attention" in done.stdout
    (path,) = tmp_path.iterdir()
    layers = {str(row["runner"]): row for row in rows_of(path) if row["op"] == "layer"}
    assert layers[f"{prompt} (torch)"]["per_key"].keys() == {"cca:window=16 (torch)"}  # type: ignore[attr-defined]
    assert "times cca:window=16 (reference)'s" in done.stdout


def test_a_wrong_kernel_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object, **options: object) -> torch.Tensor:
        return condense.attention(*arguments, **options) * 1.01  # type: ignore[arg-type, operator]

    monkeypatch.setattr(tasks, "attention", wrong)
    done = run_here(*KERNEL, "--lengths", "64", "--ops", "layer", "--results", str(tmp_path))
    assert done.returncode == 1
    assert "times the budget, not timed" in done.stdout
    (path,) = tmp_path.iterdir()
    (row,) = (row for row in rows_of(path) if row["condensed"])
    assert "times" not in row


def test_model_reads_a_saved_model(saved: Path, tmp_path: Path) -> None:
    done = run_here(
        "bench", "model", "--model", str(saved), "--device", "cpu", "--lengths", "48", "--steps", "2",
        "--method", "cca:group_size=4,window=8", "--runners", "dense,condensed", "--prefill-chunk", "20",
        "--results", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    results = json.loads(path.read_text())["results"]
    assert [row["runner"] for row in results["rows"]] == ["dense", "condensed cca:group_size=4,window=8"]
    assert results["prefill_chunk"] == 20
    assert "feed-forward modules: time to first token" in done.stdout


def test_model_runs_a_saved_model_as_it_was_saved(saved: Path, tmp_path: Path) -> None:
    command = (
        "bench", "model", "--device", "cpu", "--lengths", "48", "--steps", "2", "--runners", "dense,condensed",
    )  # fmt: skip
    done = run_here(*command, "--model", str(saved), "--results", str(tmp_path / "layer"))
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "layer").iterdir()
    dense, condensed = rows_of(path)
    method = condense.CCA(group_size=4, window=8)
    assert condensed["runner"] == "condensed CCA(group_size=4, window=8) in layers 1"
    assert condensed["method"] == {"1": method.to_dict()}
    assert condensed["gate"]["passed"]  # type: ignore[index]
    # one of two layers is condensed
    assert dense["cache_bytes"] / 2 < condensed["cache_bytes"] < dense["cache_bytes"]  # type: ignore[operator]
    model = condense.apply(LlamaForCausalLM.from_pretrained(saved), condense.LCA(group_size=4, window=8))
    for name, expected in (("whole", "LCA(group_size=4, window=8)"), ("stock", "cca")):
        model.save_pretrained(tmp_path / name)
        done = run_here(*command, "--model", str(tmp_path / name), "--results", str(tmp_path / "results" / name))
        assert done.returncode == 0, done.stderr
        (path,) = (tmp_path / "results" / name).iterdir()
        assert [row["runner"] for row in rows_of(path)] == ["dense", f"condensed {expected}"]
        condense.restore(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kernel", "--shape", "32/5"), "shape must be H/Hkv/D/Dv"),
        (("kernel", "--lengths", "0"), "lengths: wanted a number of tokens >= 1"),
        (("kernel", "--lengths", "4K,-1"), "lengths: wanted a number of tokens >= 1"),
        (("kernel", "--lengths", "K"), "lengths: wanted a number of tokens >= 1"),
        (("kernel", "--baselines", "fastest"), "baselines must be of cudnn"),
        (("kernel", "--ops", "sideways"), "ops must be of forward"),
        (("kernel", "--batch", "0"), "batch must be an integer >= 1"),
        (("kernel", "--decode-batches", "4,x"), "decode_batches must be numbers of rows >= 1"),
        (("kernel", "--dtype", "int4"), "dtype must be one of"),
        (("kernel", "--device", "abacus"), "device must be"),
        (("kernel", "--backend", "torch,abacus"), "backend must be"),
        (
            ("kernel", "--method", "dga:selection=prompt", "--ops", "decode", "--baselines", "none"),
            "ops: none of decode",
        ),
        (("kernel", "--method", "nonsense"), "method must be one of"),
        (("kernel", "--results", "file"), "results: wanted a path that can be written"),
        (("model", "--shape", "llama-9"), "shape must be one of llama-3.1-8b"),
        (("model", "--runners", "fast"), "runners must be of dense"),
        (("model", "--layers", "0"), "layers must be an integer >= 1"),
        (("model", "--steps", "0"), "steps must be an integer >= 1"),
        (("model", "--prefill-chunk", "0"), "prefill_chunk must be an integer >= 1"),
        (("model", "--lengths", "ten"), "lengths: wanted a number of tokens >= 1"),
        (("model", "--shape", "llama-3.1-8b", "--model", "x"), "shape and model exclude each other"),
        (("model", "--layers", "2", "--model", "x"), "layers belongs to a shape"),
        (("model", "--model", "./missing"), "model: no such folder"),
        (("report", "file"), "page must have a block"),
        (("report", "missing.md"), "page: no such file: missing.md"),
        (("report", "."), "page: no such file: ."),
        (("report",), "page: no such file: docs/performance.md"),
        (("nonsense",), "No such command"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    done = run_here("bench", *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
