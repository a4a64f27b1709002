"""The bundled model and text: small, offline, stock, and good both dense and condensed."""

import json
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path

import torch

import condense
from condense.results import plain
from condense.train import RECIPES, PhaseConfig


def test_assets_are_small_and_safetensors():
    assets = [path for path in Path(str(files("condense") / "assets")).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in assets) <= 24 * 2**20
    assert max(path.stat().st_size for path in assets) <= 16 * 2**20
    assert not [path for path in assets if path.suffix in {".bin", ".pt", ".pkl"}]


def test_demo_model_is_stock():
    model, tokenizer = condense.demo_model(dtype=torch.bfloat16)
    assert type(model.model.layers[0].self_attn).__name__ == "LlamaAttention"
    assert not hasattr(model.config, "condense")
    assert model.dtype == torch.bfloat16
    text = "It was 1871, at the café.\n\nTwo lines."
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_the_recipe_is_the_one_that_made_the_model(tmp_path):
    report = Path(__file__).parents[1] / "benchmarks" / "results" / "demo-model-seed0-training.json"
    phases = json.loads(report.read_text(encoding="utf-8"))["results"]["phases"]
    config = RECIPES["demo_model"]([tmp_path / "text.jsonl"], tmp_path / "model", seed=0)
    # fields that are newer than the model have their defaults, with which training is as it was
    unset = {field.name: plain(field.default) for field in fields(PhaseConfig) if field.default is not MISSING}
    made = [unset | phase["phase"] for phase in phases]
    for phase in (x for x in made if x["method"] is not None):
        phase["method"] = condense.Method.parse(phase["method"]).to_dict()
    assert made == plain(config.phases)
