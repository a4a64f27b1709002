"""The study of adaptation: its arms are phases that train accepts, and its page shows every run."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "adaptation"))

import arms
import page


@pytest.mark.parametrize("name", arms.ARMS)
def test_arms_take_as_many_steps_and_are_measured_in_as_many_ways(name):
    phase = arms.arm_phase(name, 1000)
    first, rest = arms.ARMS[name].measured()
    assert phase.steps == 1000
    assert phase.batch_size == (4 if name.endswith("-twice") else 2)
    assert [*first, *rest] == ["own", "dense", *arms.CHANGES, *arms.CONTROLS]


def test_a_window_of_as_many_keys_is_the_control():
    entries = (arms.LENGTH - arms.OWN.window) // arms.OWN.group_size
    window = arms.CONTROLS["window"]
    assert window.sink + window.window == entries + arms.OWN.window


def _run(arm, seed, found, loss, names=("own", "dense", *arms.CHANGES, *arms.CONTROLS)):
    curve = [{"step": 50 * i, "found": found * min(1, i / 10), "text_loss": loss} for i in range(1, 21)]
    parts = [{"start": 0, "stop": 512, "loss": loss + 1}, {"start": 512, "stop": 8192, "loss": loss}]
    content = {
        "arm": arm, "seed": seed, "trained": 11e6, "curve": [] if arm == "none" else curve,
        "phase": {"steps": 1000, "batch_size": 2, "sequence_length": 8192},
        "retrieval": [{"name": name, "exact": {"share": found}} for name in names],
        "text": [{"name": name, "loss": loss, "by_position": parts} for name in names],
    }  # fmt: skip
    return {"provenance": {"device": "X", "torch": "1", "transformers": "2", "commit": "c" * 40, "date": "2026-01-01T"},
            "results": content}  # fmt: skip


def test_the_page_shows_every_run(tmp_path):
    last = {"step": 1200, "dense_answer_accuracy": 0.98}
    phases = [{"phase": {"sequence_length": length}, "history": [last]} for length in (512, 8192)]
    base, other = ({**_run("none", 0, 0, 0), "results": {"seed": 0, "phases": phases, **name}}
                   for name in ({}, {"base": "base-mla"}))  # fmt: skip
    documents = [
        base, other, _run("latents", 0, 0.95, 3.2),
        _run("dense", 0, 1.0, 3.0), _run("dense", 1, 0.9, 3.1), _run("both", 0, 0.99, 3.04),
        _run("both", 1, 0.5, 3.3, names=("own", "dense")), _run("none", 0, 0.1, 3.5),
    ]  # fmt: skip
    (tmp_path / "study.json").write_text(json.dumps(documents))
    shape = {"shape": "llama", "train": "all", "length": 32768, "processes": 4,
             "rows": [{"name": "condensed", "tokens_per_second": [1, 9000, 8000], "peak_gib": 40.12}]}  # fmt: skip
    speeds = {"condensed": [1, 2500, 2600], "dense": [1, 1000, 1100]}
    rows = [{"name": name, "tokens_per_second": speeds[name], "peak_gib": 40.12} for name in speeds]
    one = {"processes": 1, "rows": rows}
    origin = documents[0]["provenance"]
    for name, content in (("shape", shape), ("one", shape | one)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"provenance": origin, "results": content}))
    shapes = [tmp_path / "shape.json", tmp_path / "one.json"]
    again = [base, _run("dense", 0, 1.0, 3.02), _run("both", 0, 0.8, 3.05), _run("half", 1, 0.9, 3.2)]
    (tmp_path / "again.json").write_text(json.dumps(again))
    page.write_page([tmp_path / "study.json", tmp_path / "again.json"], shapes, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "{{" not in text
    # 0.9 of the control's 1.0 is reached at the tenth measurement; 0.9 of the other's 0.9 never
    assert "| distilled, growing groups | 500, never | 0.990, 0.500 | 3.040, 3.300 | 0.040, 0.200 |" in text
    # other bases: above their own control, or the first of that seed
    assert "| distilled, growing groups [2] | never | 0.800 | 3.050 | 0.030 |" in text
    assert "| both, half of the loss the KL [2] | 450 | 0.900 | 3.200 | 0.100 |" in text
    # another base, so no control: 0.9 of all, which 0.95 has from the tenth measurement on
    assert "| both, LCA on latents | 500 | 0.950 | 3.200 |  |" in text
    assert "| not adapted |  | 0.100 | 3.500 |" in text
    assert "| 0.99, ?; 3.040 |" in text
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    for seed in ("0", "0 [2]", "0, latents"):
        assert f"| {seed} | 1,200 steps: 0.980 | 1,200 steps: 0.980 |" in text
    assert "| condensed | 8,000 | ? | 2 | 40.1 GiB |" in text
    assert "| condensed | 2,500 | 2.50 | 2 | 40.1 GiB |" in text
    assert "llama, condensed, 32,768 tokens: 4 GPUs train 80% of 4 times what one does." in text
    assert "recipes that were not run: *growing groups*; *plain*;" in text
    assert text.count(f"commit {'c' * 12}, 2026-01-01") == 4
