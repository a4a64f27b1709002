"""Names for settings: accepted wherever a method is, shown in full, saved in full."""

import json
from pathlib import Path

import pytest
import torch
from models import tiny
from small_models import random_llama
from transformers import AutoConfig, AutoModelForCausalLM

import condense
from condense.models import condensed_layers
from condense.named import NAMED_SETTINGS
from condense.plots import method_labels
from condense.serving.plan import serving_plan
from condense.train.recipes import adapt, read_recipe

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMED_SETTINGS)
def test_a_name_is_a_method_with_all_settings(name):
    method = condense.Method.parse(name)
    settings = NAMED_SETTINGS[name].settings
    assert method.to_dict() == method.to_dict() | settings
    assert condense.Method.parse({"method": name}) == method
    assert condense.Method.parse(f"{name}:window=96") == method.replace(window=96)
    assert condense.Method.parse({"method": name, "window": 96}) == method.replace(window=96)
    assert README.count(f"\n- **`{name}`**, for a model ") == 1


@pytest.mark.parametrize("name", NAMED_SETTINGS)
def test_whole_chunks_and_steps_agree(name):
    """With a window, and a number of open groups if there are any, that 150 tokens leave behind."""
    small = "window=16" if name == "pooled" else "window=16,num_recall=2"
    model = condense.apply(random_llama().double(), f"{name}:{small}")
    ids = tiny.tokens(2, 150)
    whole = tiny.logits(model, ids)
    torch.testing.assert_close(tiny.in_chunks(model, ids, (70, 3, *[1] * 40, 37)), whole)
    assert (whole - tiny.logits(condense.restore(model), ids)).abs().max() > 1e-2  # some tokens are not seen


def test_a_method_is_labelled_by_the_name_of_its_settings():
    choices = [condense.Method.parse(text) for text in ("recall-host", "recall-host:window=8", "cca", "cca:window=8")]
    mixed = {0: choices[0], 1: choices[2]}
    assert method_labels([*choices, mixed]) == ["recall-host", "Recall", "CCA 1", "CCA 2", "recall-host+CCA"]


def test_an_unknown_name_is_refused_with_the_names_that_are_close():
    with pytest.raises(ValueError, match=r"'pooled'\], got 'recall-hosts'; close: recall-host"):
        condense.Method.parse("recall-hosts")
    with pytest.raises(ValueError, match=r"recall: unknown settings \['gamma'\]"):
        condense.Method.parse("recall-host:gamma=3")


def test_a_model_is_saved_with_settings_whatever_named_them(tmp_path):
    model = random_llama()
    condense.apply(model, "recall-device:window=8@0+pooled@rest")
    model.save_pretrained(tmp_path)
    wanted = dict(enumerate(map(condense.Method.parse, ("recall-device:window=8", "pooled"))))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert [part["method"] for part in config["condense"]["methods"]] == [m.to_dict() for m in wanted.values()]
    config["condense"]["methods"][1]["method"] = {"method": "pooled"}  # as somebody may write it by hand
    path.write_text(json.dumps(config))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert condensed_layers(loaded) == wanted
    loaded.save_pretrained(tmp_path / "again")
    again = AutoConfig.from_pretrained(tmp_path / "again").condense
    assert again["methods"] == model.config.condense["methods"]


def test_recipes_and_serving_take_a_name(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('pretrained = "DIR"\nmethod = "pooled"\n')
    config = adapt([tmp_path / "text"], tmp_path / "out", **read_recipe(recipe))
    assert config.phases[0].method == condense.Method.parse("pooled")
    assert serving_plan(condense.Method.parse("pooled")).group_size > 1
