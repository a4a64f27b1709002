"""Save, and load in a fresh process: condensed after `import condense`, refused without it."""

import json

import pytest
import torch
from fresh import run
from models import loading, tiny
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import condense
from condense.models import condensed_layers, families

SAVED = {
    "llama": {0: tiny.CCA, 2: tiny.STREAMING_6}, "qwen3": dict.fromkeys(range(3), tiny.STREAMING),
    "gemma": dict.fromkeys(range(3), tiny.METHODS["lca"]),
    "gpt2": {0: condense.Dense(), 1: tiny.METHODS["streaming-llm"]},
    "opt": dict.fromkeys(range(3), tiny.METHODS["lm-infinite"]), "qwen2-mixed": {0: tiny.CCA},
    "minicpm3": {0: tiny.METHODS["lca"], 2: tiny.CCA},
}  # fmt: skip
IDS = tiny.tokens()


def _assert_equal(a, b):
    # loaded weights lie at other addresses, where some fused loops round the last bit differently; stock ones too
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def models():
    # float32: some buffers are made in the dtype of loading, not in that of the weights
    return {name: condense.apply(tiny.model(name, torch.float32), SAVED[name]) for name in SAVED}


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    torch.save(IDS, folder / "ids.pt")
    torch.save(models["llama"], folder / "module.pt")
    return folder


def test_a_fresh_process_loads_condensed_after_import_and_refuses_without(models, folder):
    run(loading.without_and_with_condense, folder, list(SAVED))
    fresh = torch.load(folder / "fresh.pt")
    for name, model in models.items():
        assert 'attn_implementation="condense"` is not supported' in fresh["without"][name], name
        logits, attention = fresh["with"][name]
        _assert_equal(logits, tiny.logits(model, IDS))
        assert attention.startswith("Condensed"), name
    _assert_equal(fresh["pickled"], tiny.logits(models["llama"], IDS))


def test_the_folder_says_how_to_load_it(folder, tmp_path):
    card = (folder / "llama" / "README.md").read_text(encoding="utf-8")
    assert "import condense\nfrom transformers import AutoModelForCausalLM" in card
    assert str(tiny.CCA) in card
    assert str(tiny.STREAMING_6) in card
    (tmp_path / "README.md").write_text("mine")
    AutoModelForCausalLM.from_pretrained(folder / "llama").save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("module", "line"),
    [("mine", "import mine  # defines Mine"), ("__main__", "# here the class Mine, which a script defined")],
)
def test_the_folder_says_where_a_method_of_ones_own_is_defined(module, line, tmp_path):
    class Mine(condense.CCA):
        name = "mine"
        __module__ = module

    condense.apply(tiny.model("llama"), {0: Mine(), "rest": tiny.CCA}).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"import condense\n{line}\nfrom transformers import" in card


@pytest.mark.parametrize("name", SAVED)
def test_assignments_survive_and_the_rest_stays_stock(models, folder, name):
    loaded = AutoModelForCausalLM.from_pretrained(folder / name)
    assert condensed_layers(loaded) == SAVED[name]
    weights, saved = loaded.state_dict(), models[name].state_dict()
    assert weights.keys() == saved.keys() == tiny.model(name).state_dict().keys()
    assert all(torch.equal(weights[key], value) for key, value in saved.items())
    written = json.loads((folder / name / "config.json").read_text())
    assert written["architectures"] == [f"Condensed{type(models[name]).__name__}"]
    # trainers find the class by it
    assert AutoConfig.from_pretrained(folder / name).architectures == [type(models[name]).__name__]
    assert written["model_type"] == models[name].config.model_type
    assert written["attn_implementation"] == "condense"
    assert written["condense"]["version"] == condense.__version__


def test_what_runs_is_what_is_saved(folder, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path / "off")
    assert not condensed_layers(AutoModelForCausalLM.from_pretrained(tmp_path / "off"))
    assert not (tmp_path / "off" / "README.md").exists()
    model.set_attn_implementation("condense")
    model.save_pretrained(tmp_path / "on")
    assert condensed_layers(AutoModelForCausalLM.from_pretrained(tmp_path / "on")) == SAVED["llama"]
    # nor is the folder a stock model's, or another's, because the configuration was edited
    for settings in (None, model.config.condense | _assigned_to([0])):
        model.config.condense = settings
        tiny.refused(r"config.condense must say what runs, .*, got .*: leave it to", model.save_pretrained, tmp_path)
    # nor does the folder say what was saved there before
    condense.apply(model, "recall:window=64").save_pretrained(tmp_path / "on")
    assert "Recall(window=64)" in (tmp_path / "on" / "README.md").read_text()
    del model.config.condense
    condense.restore(model).save_pretrained(tmp_path / "on")
    assert not condensed_layers(condense.restore(AutoModelForCausalLM.from_pretrained(tmp_path / "on")))
    assert not (tmp_path / "on" / "README.md").exists()
    # unknown classes are not silently dense
    monkeypatch.setattr(families, "FAMILIES", {k: v for k, v in families.FAMILIES.items() if v != "llama"})
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", attn_implementation="sdpa")
    tiny.refused(r"works through condense\.apply", tiny.logits, model, IDS)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", None], ids=str)
@pytest.mark.parametrize("cls", [AutoModelForCausalLM, LlamaForCausalLM], ids=["auto", "direct"])
def test_the_callers_implementation_is_what_restore_returns_to(models, folder, cls, implementation):
    loaded = cls.from_pretrained(folder / "llama", attn_implementation=implementation)
    _assert_equal(tiny.logits(loaded, IDS), tiny.logits(models["llama"], IDS))
    condense.restore(loaded)
    assert loaded.config._attn_implementation == (implementation or "sdpa")
    stock = condense.restore(AutoModelForCausalLM.from_pretrained(folder / "llama"))
    stock.set_attn_implementation(implementation or "sdpa")
    _assert_equal(tiny.logits(loaded, IDS), tiny.logits(stock, IDS))


@pytest.mark.parametrize("build", [AutoModelForCausalLM.from_config, LlamaForCausalLM], ids=["auto", "direct"])
def test_built_from_a_configuration_and_loaded_with_fewer_layers(models, folder, build):
    built = build(AutoModelForCausalLM.from_pretrained(folder / "llama").config).eval()
    built.load_state_dict(models["llama"].state_dict())
    assert condensed_layers(built) == SAVED["llama"]
    _assert_equal(tiny.logits(built, IDS), tiny.logits(models["llama"], IDS))
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", num_hidden_layers=2)
    assert condensed_layers(model) == {i: m for i, m in condensed_layers(models["llama"]).items() if i < 2}


def _assigned_to(layers, method="cca", **changes):
    return {"methods": [{"method": {"method": method} | changes, "layers": layers}]}


FORM = r"config.condense must be .* as condense.apply writes it, got"
BAD = {
    "text": ("cca", FORM),
    "nothing": ({}, FORM),
    "no methods": ({"methods": []}, r"config.condense.* (name a layer, got none|as condense.apply writes it)"),
    "an empty list": (_assigned_to([]), r"config.condense.* name a layer, got none"),  # dense without a word
    "none that is there": (_assigned_to([3]), r"name layers that the model has, 0-2, got 3: correct it, or"),
    "unknown": (_assigned_to([0], "mystery"), r"method must be one of .*, got 'mystery'"),
    "another": (_assigned_to([0], mystery=1) | {"version": "99.0"}, rf"99.0, this is {condense.__version__}.*mystery"),
} | {  # some had been read as other layers, some as none
    repr(layers): (_assigned_to(layers), r"config.condense.* layers must be a list of integers >= 0, got")
    for layers in ("12", [0.9], [True], {"5": 0}, [-1], [float("inf")], None, [0, None])
}


@pytest.mark.parametrize(("settings", "message"), BAD.values(), ids=BAD)
def test_bad_settings_are_refused(folder, tmp_path, settings, message):
    config = json.loads((folder / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"condense": settings}))
    tiny.refused(message, AutoModelForCausalLM.from_config, AutoConfig.from_pretrained(tmp_path))
