"""The study of calibrated allocations, tried out on a small model."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import condense

ROOT = Path(__file__).parents[2]


@pytest.fixture
def study():
    spec = importlib.util.spec_from_file_location("calibration_study", ROOT / "benchmarks" / "calibration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_and_picture(study, monkeypatch, tmp_path):
    _, tokenizer = condense.demo_model()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    text, results = tmp_path / "text.txt", tmp_path / "results.json"
    text.write_text(condense.demo.demo_text().text)
    options = {
        "data": text, "test": text, "model": tmp_path / "model", "output": results, "length": 512, "window": 32,
        "num-recall": 2, "texts": 2, "sequences": 2, "budget-nats": 1,
    }  # fmt: skip
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["calibration.py", "run", *arguments])
    study.main()
    content = json.loads(results.read_text())["results"]
    names = [asked["name"] for asked in content["retrieval"]]
    assert names == [
        "dense", "window", "recall", "cca", "recall in 2", "recall in 1", "recall in all but the most needed", "chosen",
    ]  # fmt: skip
    assert content["choices"]["recall in 1"].count("Recall(") == 1
    assert len(content["layers"]) == 6
    monkeypatch.setattr(sys, "argv", ["x", "plot", "--results", str(results), "--output", str(tmp_path / "a.png")])
    study.main()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_how_long_a_calibration_takes(study, monkeypatch, tmp_path):
    tokenizer = condense.demo_model()[1]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
    monkeypatch.setattr(study, "random_model", lambda shape, dtype, device: model)
    text, results = tmp_path / "text.txt", tmp_path / "results.json"
    text.write_text(condense.demo.demo_text().text)
    options = ["--data", str(text), "--output", str(results), "--length", "900", "--texts", "2"]
    monkeypatch.setattr(sys, "argv", ["calibration.py", "time", "--cache", "0.5", *options])
    study.main()
    content = json.loads(results.read_text())["results"]
    assert content["layers"] == 2
    assert len(content["candidates"]) == 5
    # a dense forward per text, five candidates in all layers, four in each alone, and points of the curve
    assert 2 * (1 + 5 + 8) < content["forwards"] <= content["estimated_forwards"]
    assert content["seconds"] > 0
    assert all(times["step_s"] > 0 for times in content["times"].values())
