"""LoRA on condensed attention; adapters that carry its methods; what cannot be combined says so."""

import json
from importlib.metadata import version

import pytest
import torch
from fresh import run
from grids import grid
from models import loading, tiny
from packaging.version import Version
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from transformers import AutoModelForCausalLM

import condense
from condense.caches import CACHE
from condense.models import condensed_layers

# peft still asks transformers by the old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
TARGETS = {
    "llama": ["q_proj", "v_proj"], "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj"], "phi3": ["qkv_proj"],
    "gpt2": ["c_attn"], "opt": ["q_proj", "v_proj"], "deepseek_v3": ["q_b_proj", "kv_b_proj"],
    "minicpm3": ["kv_a_proj_with_mqa", "kv_b_proj"],
}  # fmt: skip
IDS = tiny.tokens(2, 40)
OTHER_METHOD = "was trained with CCA.*, the model has CCA.*condense.restore"
# transformers 5.24 asks for PEFT 0.22, and gives no cache to an older one
OLD_PEFT = CACHE == "cache" and Version(version("peft")) < Version("0.22")


def _lora(name):
    weights = {"init_lora_weights": False, "fan_in_fan_out": name == "gpt2"}
    return LoraConfig(r=4, target_modules=TARGETS[name], task_type="CAUSAL_LM", **weights)


def _with_adapter(name, order):
    torch.manual_seed(0)
    model = tiny.model(name)
    if order == "before":
        return get_peft_model(condense.apply(model, tiny.STREAMING_6), _lora(name)).to(torch.float64).eval()
    wrapped = get_peft_model(model, _lora(name)).to(torch.float64).eval()
    assert condense.apply(wrapped, tiny.STREAMING_6) is wrapped
    return wrapped


@grid(8, name=[*TARGETS], order=["before", "after"])
def test_lora(name, order):
    model = _with_adapter(name, order)
    assert set(condensed_layers(model)) == {0, 1, 2}
    full = tiny.logits(model, IDS)
    torch.testing.assert_close(tiny.in_chunks(model, IDS, (17, 1, 22)), full, **tiny.EXACT)
    assert torch.equal(tiny.generate(model, IDS), tiny.generate(model, IDS, use_cache=False))
    dense = tiny.logits(condense.restore(model), IDS)
    assert (dense - full).abs().max() > 1
    with condense.use(model, tiny.STREAMING_6):
        assert torch.equal(tiny.logits(model, IDS), full)
    assert torch.equal(tiny.logits(model, IDS), dense)
    condense.apply(model, tiny.STREAMING_6)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
    assert gradients
    assert all("lora_" in key and bool(grad.any()) for key, grad in gradients.items())
    merged = model.merge_and_unload()
    assert set(condensed_layers(merged)) == {0, 1, 2}
    torch.testing.assert_close(tiny.logits(merged, IDS), full, rtol=0, atol=1e-10)
    torch.testing.assert_close(tiny.logits(condense.restore(merged), IDS), dense, rtol=0, atol=1e-10)


def test_prefix_tuning_is_refused():
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    expected = tiny.logits(model, IDS)
    wrapped = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)).to(torch.float64)
    tiny.refused("prefix tuning, which condensed attention does not support", wrapped, input_ids=IDS)
    assert torch.equal(tiny.logits(model, IDS), expected)


def test_prompt_tuning_works():
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    wrapped = get_peft_model(model, config).to(torch.float64).eval()
    mask = torch.ones_like(IDS)
    with torch.no_grad():
        whole = wrapped(input_ids=IDS, attention_mask=mask, use_cache=False).logits[:, 5:]
        out = wrapped(input_ids=IDS[:, :30], attention_mask=mask[:, :30], use_cache=True)
    rest = tiny.in_chunks(model, IDS[:, 30:], (1, 1, 8), out[CACHE])
    torch.testing.assert_close(torch.cat([out.logits[:, 5:], rest], 1), whole, **tiny.EXACT)
    assert (tiny.logits(model, IDS) - whole).abs().max() > 1e-3


def test_attention_that_is_trained_as_a_copy_is_refused_and_its_projections_are_not():
    def peft(model, name):
        return get_peft_model(model, LoraConfig(target_modules=["up_proj"], modules_to_save=[name])).double().eval()

    for name in ("self_attn", "layers.1"):
        wrapped = peft(tiny.model("llama"), name)
        tiny.refused("two attentions of layer .* in modules_to_save", condense.apply, wrapped, tiny.CCA)
        model = condense.apply(tiny.model("llama"), tiny.CCA)
        tiny.refused(r"modules_to_save must not hold condensed attention.* \(such as q_proj\)", peft, model, name)
    model = condense.apply(tiny.model("llama"), tiny.CCA)
    expected = tiny.logits(model, IDS)
    assert torch.equal(tiny.logits(peft(model, "q_proj"), IDS), expected)


def test_an_adapter_per_row():
    """Rows of MLA share one projection of their latents; ordinary keys need none."""
    ids = IDS[:, :20]
    model, latents = (_with_adapter(name, "after") for name in ("llama", "deepseek_v3"))
    for each, name in ((model, "llama"), (latents, "deepseek_v3")):
        each.add_adapter("other", _lora(name))
        each.to(torch.float64).eval()
    mixed = tiny.logits(model, ids, adapter_names=["default", "other"])
    for row, adapter in enumerate(("default", "other")):
        model.set_adapter(adapter)
        torch.testing.assert_close(mixed[row : row + 1], tiny.logits(model, ids[row : row + 1]), **tiny.EXACT)
    with condense.use(model, tiny.REREAD), torch.no_grad():  # whose pieces have rows of their own
        mixed = tiny.generate(model, IDS, adapter_names=["default", "other"])
        for row, adapter in enumerate(("default", "other")):
            model.set_adapter(adapter)
            assert torch.equal(mixed[row], tiny.generate(model, IDS[row : row + 1])[0])
    settings = _lora("llama").to_dict() | {"alora_invocation_tokens": [4]}
    begins = get_peft_model(tiny.model("llama"), LoraConfig(**settings)).double().eval()
    condense.apply(begins, tiny.REREAD)
    tiny.refused("parts of alora_offsets", tiny.generate, begins, IDS)
    said = r"adapter_names .* call the model once per adapter"
    tiny.refused(said, tiny.logits, latents, ids, adapter_names=["default", "other"])


@pytest.fixture
def base(tmp_path):
    tiny.model("llama", torch.float32).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def _condensed(folder):
    return condense.apply(_load(folder), {2: tiny.STREAMING_6, "rest": tiny.CCA})


@pytest.fixture
def trained(base, tmp_path):
    model = get_peft_model(_condensed(base), _lora("llama")).eval()
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", tiny.logits(model, IDS)


def test_the_base_is_condensed_when_the_adapter_loads_and_not_in_another_way(base, trained):
    folder, expected = trained
    assert json.loads((folder / "condense.json").read_text())["version"] == condense.__version__
    run(loading.import_peft_after_condense, folder)
    by_transformers = _load(base)
    by_transformers.load_adapter(str(folder))
    by_peft = [PeftModel.from_pretrained(model, folder) for model in (_load(base), _condensed(base))]
    for model in (*by_peft, AutoPeftModelForCausalLM.from_pretrained(folder), _load(folder), by_transformers):
        assert condensed_layers(model) == {0: tiny.CCA, 1: tiny.CCA, 2: tiny.STREAMING_6}
        torch.testing.assert_close(tiny.logits(model.eval(), IDS), expected, rtol=0, atol=1e-4)
    model = condense.apply(_load(base), tiny.CCA)
    tiny.refused(OTHER_METHOD, PeftModel.from_pretrained, model, folder)
    assert condensed_layers(model) == dict.fromkeys(range(3), tiny.CCA)


def _swap(model, folder, *, by_peft):
    if by_peft:
        hotswap_adapter(model, folder, adapter_name="default", torch_device="cpu")
    else:
        model.load_adapter(str(folder), "default", hotswap=True)


@pytest.mark.parametrize("by_peft", [True, False])
def test_weights_are_swapped_for_those_of_the_same_methods(base, trained, by_peft):
    folder, expected = trained
    for name, choice in (("stock", None), ("same", {2: tiny.STREAMING_6, "rest": tiny.CCA}), ("other", tiny.CCA)):
        model = _load(base) if choice is None else condense.apply(_load(base), choice)
        get_peft_model(model, _lora("llama")).save_pretrained(base / name)
        model = PeftModel.from_pretrained(_load(base), base / name) if by_peft else _load(base / name)
        before = tiny.logits(model.eval(), IDS)
        if name == "other":
            tiny.refused(OTHER_METHOD, _swap, model, folder, by_peft=by_peft)
        else:
            _swap(model, folder, by_peft=by_peft)
        assert (before - expected).abs().max() > 1e-2
        torch.testing.assert_close(tiny.logits(model, IDS), before if name == "other" else expected, rtol=0, atol=1e-4)


def test_without_a_condensed_base_nothing_is_written(base, tmp_path):
    """Nor for a module that is no model."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    get_peft_model(module, LoraConfig(target_modules=["0"])).save_pretrained(tmp_path / "module")
    assert not (tmp_path / "module" / "condense.json").exists()
    get_peft_model(_load(base), _lora("llama")).save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "condense.json").exists()
    assert not condensed_layers(PeftModel.from_pretrained(_load(base), tmp_path / "plain"))


def test_only_the_adapters_that_are_saved_get_a_record(base, trained):
    """Others beneath or beside them are those of other models, or of this one when it had another method."""
    folder, _ = trained
    before = (folder / "condense.json").read_text()
    for model in (_load(base), condense.apply(_load(base), "recall:window=64")):
        get_peft_model(model, _lora("llama")).save_pretrained(folder.parent)
        assert (folder / "condense.json").read_text() == before
    several = get_peft_model(_condensed(base), _lora("llama"))
    several.add_adapter("other", _lora("llama"))
    several.save_pretrained(folder.parent / "two")
    assert [(folder.parent / "two" / name / "condense.json").is_file() for name in (".", "other")] == [True, True]
    model = PeftModel.from_pretrained(_load(base), folder)
    model.add_adapter("other", _lora("llama"))
    condense.apply(model, "recall:window=64")
    model.save_pretrained(folder, selected_adapters=["other"])
    assert (folder / "condense.json").read_text() == before
    assert "recall" in (folder / "other" / "condense.json").read_text()
    _load(base).save_pretrained(folder)
    assert (folder / "condense.json").read_text() == before


def test_a_base_is_stock_again_when_an_adapter_cannot_be_loaded(base, trained):
    folder, _ = trained
    (folder / "adapter_model.safetensors").unlink()
    record = json.loads((folder / "condense.json").read_text())
    (folder / "condense.json").write_text(json.dumps(record | {"condense_adapted": record}))
    model = get_peft_model(_load(base), _lora("llama"))
    with pytest.raises((OSError, ValueError)):
        model.load_adapter(str(folder), "second")
    assert not condensed_layers(model)
    assert not hasattr(model.config, "condense_adapted")


@pytest.mark.parametrize("by_peft", [True, False])
def test_an_adapter_of_a_model_that_is_stock_now_has_no_record(base, trained, by_peft):
    folder, expected = trained
    if by_peft:
        model = PeftModel.from_pretrained(_load(base), folder)
        model.get_base_model().set_attn_implementation("sdpa")
    else:
        model = condense.restore(_load(folder))
        if OLD_PEFT:
            tiny.refused("version of PEFT you are using is not compatible", model.save_pretrained, folder)
            return
    model.save_pretrained(folder)
    assert not (folder / "condense.json").exists()
    assert (tiny.logits(_load(folder), IDS) - expected).abs().max() > 1


def test_an_adapter_says_that_its_model_was_adapted(base, tmp_path):
    model = get_peft_model(_condensed(base), _lora("llama"))
    model.get_base_model().config.condense_adapted = model.config.condense
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(_load(base), tmp_path / "adapter")
    assert loaded.merge_and_unload().config.condense_adapted == model.config.condense
