"""Steps whose norms and rotations are compiled: the same numbers, and nothing stays changed."""

import sys

import pytest
import torch
from models import small, tiny

import condense
from condense.models import fused

MODELS = {"llama": tiny.model, "qwen3": tiny.model, "gemma2": small.model, "deepseek_v3": tiny.model}


@pytest.fixture(params=MODELS)
def model(request, monkeypatch):
    """A condensed model that is large enough; backends that compile nothing are quick."""
    monkeypatch.setattr(fused, "_LEAST_WEIGHTS", 0)
    monkeypatch.setattr(fused, "_BACKEND", "aot_eager")
    monkeypatch.setattr(fused, "_FAILED", set())
    fused._compiled.cache_clear()
    yield condense.apply(MODELS[request.param](request.param), tiny.METHODS["lca"])
    fused._compiled.cache_clear()


def step(model, cache):
    with torch.no_grad():
        return model(tiny.tokens(2, 1, seed=5), past_key_values=cache).logits


def test_steps_compute_the_same(model):
    first, second = (tiny.filled(model, tiny.tokens(2, 30)) for _ in range(2))
    file = sys.modules[type(model.model.layers[0].self_attn).__mro__[2].__module__]
    rotation = file.apply_rotary_pos_emb
    with fused.fused_steps(model, 2):
        assert all("forward" in vars(module) for module in model.modules() if type(module).__name__.endswith("RMSNorm"))
        assert file.apply_rotary_pos_emb is not rotation
        got = step(model, first)
    torch.testing.assert_close(got, step(model, second), **tiny.exact(model))
    assert not any("forward" in vars(module) for module in model.modules())
    assert file.apply_rotary_pos_emb is rotation


def test_small_models_and_compilers_that_fail_leave_norms_as_they_are(model, monkeypatch, caplog):
    monkeypatch.setattr(fused, "_BACKEND", "no-such-backend")
    fused._compiled.cache_clear()
    for least, said in ((2**29, 0), (0, 1), (0, 1)):
        monkeypatch.setattr(fused, "_LEAST_WEIGHTS", least)
        with fused.fused_steps(model, 2):
            assert not any("forward" in vars(module) for module in model.modules())
        assert len([x for x in caplog.messages if "PyTorch cannot compile them" in x]) == said
