"""apply, restore, use: nested, per layer, in exceptions, and beside what users do to the model themselves."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from models import tiny
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, modeling_layers

import condense
from condense.models import condensed_layers

IDS = tiny.tokens()


@pytest.fixture
def model():
    return tiny.model("llama")


def test_apply_replaces_what_was_applied_and_records_the_choice(model):
    assert condense.apply(condense.apply(model, tiny.STREAMING.to_dict()), tiny.CCA) is model
    assert condensed_layers(model) == dict.fromkeys(range(3), tiny.CCA)
    assert model.config.condense == {"methods": [{"method": tiny.CCA.to_dict(), "layers": [0, 1, 2]}]}
    assert model.config._attn_implementation == "condense"
    assert torch.equal(tiny.logits(model, IDS), tiny.logits(condense.apply(tiny.model("llama"), tiny.CCA), IDS))


def test_layers_merge(model):
    stock = tiny.logits(model, IDS)
    condense.apply(model, tiny.CCA, layers={-2})
    one = tiny.logits(model, IDS)
    assert condensed_layers(model) == {1: tiny.CCA}
    condense.apply(model, tiny.STREAMING_6, layers=range(1))
    two = tiny.logits(model, IDS)
    assert condensed_layers(model) == {0: tiny.STREAMING_6, 1: tiny.CCA}
    assert [part["layers"] for part in model.config.condense["methods"]] in ([[0], [1]], [[1], [0]])
    for a, b in ((stock, one), (one, two)):
        assert (a - b).abs().max() > 1
    assert torch.equal(tiny.logits(condense.restore(model), IDS), stock)


def test_use_nests_and_survives_exceptions(model):
    condense.apply(model, tiny.CCA)
    outer = tiny.logits(model, IDS)
    config = copy.deepcopy(model.config.to_dict())
    with condense.use(model, tiny.STREAMING) as used:
        assert used is model
        middle = tiny.logits(model, IDS)
        assert (middle - outer).abs().max() > 1
        with condense.use(model, condense.Dense(), layers=[0, 2]):
            assert condensed_layers(model) == {0: condense.Dense(), 1: tiny.STREAMING, 2: condense.Dense()}
        with pytest.raises(RuntimeError, match="on purpose"), condense.use(model, condense.Dense()):
            raise RuntimeError("on purpose")
        assert torch.equal(tiny.logits(model, IDS), middle)
        tiny.refused("layers must be indices", tiny.enter, model, tiny.CCA, layers=[7])
        assert torch.equal(tiny.logits(model, IDS), middle)
    assert torch.equal(tiny.logits(model, IDS), outer)
    assert model.config.to_dict() == config


def in_another_thread(call, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


def test_a_use_block_is_for_the_thread_that_enters_it(model):
    """Also after a block inside it; another thread's model would change in the middle of a text."""
    stock, refused = tiny.logits(model, IDS), pytest.raises(ValueError, match="use block of another thread")
    reads = [(call, model, IDS) for call in (tiny.logits, tiny.generate)]
    changes = [(call, model, tiny.STREAMING) for call in (condense.apply, tiny.enter)] + [(condense.restore, model)]
    with condense.use(model, tiny.CCA):
        mine = tiny.logits(model, IDS)
        for _ in range(2):
            for call in (*reads, *changes):
                with refused:
                    in_another_thread(*call)
            tiny.enter(model, tiny.STREAMING)
        assert torch.equal(tiny.logits(model, IDS), mine)
    assert torch.equal(in_another_thread(tiny.logits, model, IDS), stock)


def test_use_may_hold_restore_and_apply(model):
    stock = tiny.logits(model, IDS)
    with condense.use(model, tiny.CCA):
        condense.restore(model)
        assert torch.equal(tiny.logits(model, IDS), stock)
        condense.apply(model, tiny.STREAMING, layers=[1])
    assert torch.equal(tiny.logits(model, IDS), stock)
    assert condensed_layers(model) == {}


def test_use_runs_no_operation_on_tensors():
    """So it can be entered in every training step, and waits for no device."""
    model = tiny.model("llama")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tiny.enter(model, tiny.CCA)
    assert [event.name for event in profile.events()] == []


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_implementation_set_afterwards_has_the_last_word(model, implementation):
    stock = tiny.logits(model, IDS)
    condense.apply(model, tiny.CCA)
    condensed = tiny.logits(model, IDS)
    model.set_attn_implementation(implementation)
    budget = {"sdpa": 1e-12, "eager": 1e-4}[implementation]  # eager takes its softmax in float32
    torch.testing.assert_close(tiny.logits(model, IDS), stock, rtol=0, atol=budget)
    torch.testing.assert_close(tiny.in_chunks(model, IDS, tiny.CHUNKS), stock, rtol=0, atol=budget)
    assert tiny.generate(model, IDS).shape == (2, tiny.LENGTH + tiny.NEW)
    with condense.use(model, tiny.CCA):
        assert torch.equal(tiny.logits(model, IDS), condensed)
    torch.testing.assert_close(tiny.logits(model, IDS), stock, rtol=0, atol=budget)
    model.set_attn_implementation("condense")
    assert torch.equal(tiny.logits(model, IDS), condensed)
    model.set_attn_implementation(implementation)
    condense.restore(model)
    assert model.config._attn_implementation == implementation


class _Doubling(ModelHook):
    def post_forward(self, module, output):
        return (2 * output[0], *output[1:])


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_hooks_keep_working(model, when):
    reference = condense.apply(tiny.model("llama"), tiny.CCA)
    for layer in reference.model.layers:
        layer.self_attn.o_proj.weight.data *= 2
    expected = tiny.logits(reference, IDS)
    if when == "after":
        condense.apply(model, tiny.CCA)
    for layer in model.model.layers:
        add_hook_to_module(layer.self_attn, _Doubling())
    if when == "before":
        condense.apply(model, tiny.CCA)
    torch.testing.assert_close(tiny.logits(model, IDS), expected, **tiny.EXACT)
    torch.testing.assert_close(tiny.in_chunks(model, IDS, tiny.CHUNKS), expected, **tiny.EXACT)
    stock = tiny.logits(condense.restore(reference), IDS)
    torch.testing.assert_close(tiny.logits(condense.restore(model), IDS), stock, **tiny.EXACT)


def test_a_deep_copy_is_condensed_and_independent(model):
    condense.apply(model, tiny.CCA)
    expected = tiny.logits(model, IDS)
    clone = copy.deepcopy(model)
    assert torch.equal(tiny.logits(clone, IDS), expected)
    condense.restore(clone)
    assert (tiny.logits(clone, IDS) - expected).abs().max() > 1
    assert torch.equal(tiny.logits(model, IDS), expected)


def test_the_inner_model_alone_is_condensed_and_restored(model):
    inner, stock = model.model, tiny.logits(model, IDS)
    condense.apply(inner, tiny.CCA)
    full = tiny.logits(model, IDS)
    assert (full - stock).abs().max() > 1
    torch.testing.assert_close(tiny.in_chunks(model, IDS, (30, 31)), full, **tiny.EXACT)
    condense.restore(inner)
    assert torch.equal(tiny.logits(model, IDS), stock)
    condense.apply(model, tiny.CCA)
    condense.restore(inner)  # which the outer one condensed
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(tiny.logits(model, IDS), stock)
    condense.restore(condense.apply(model, tiny.CCA))
    assert torch.equal(tiny.logits(model, IDS), stock)


if hasattr(modeling_layers, "MtpModel"):  # from transformers 5.24 on

    def test_layers_for_multi_token_prediction_count_from_0_again():
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2}
        config = Glm4MoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, first_k_dense_replace=8)
        config.num_mtp_layers = 1
        for layer, condensed in ((-1, {}), (0, {0: tiny.CCA})):
            model = condense.apply(Glm4MoeForCausalLM(config), tiny.CCA, layers=[layer])
            assert condensed_layers(modeling_layers.MtpModel(model, 1)) == condensed
            condense.restore(model)
