"""Steps and prompts whose norms and rotations are compiled: the same numbers, and nothing stays changed."""

import sys
import threading

import pytest
import torch
from models import small, tiny

import condense
from condense.models import fused, hooks, prompts

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


def test_prompts_compute_the_same_and_short_ones_stay_as_they_are(model, monkeypatch):
    ids, forms, compiled, read = tiny.tokens(2, 30), [], fused._compiled, []
    monkeypatch.setattr(prompts, "_PIECE", 16)
    want = model(ids).logits
    first = next(module for module in model.modules() if type(module).__name__.endswith("MLP"))
    first.get_submodule("up_proj").register_forward_hook(
        lambda module, args, out: read.append(args[0].shape[:-1].numel())
    )
    with monkeypatch.context() as patched:
        patched.setattr(fused, "_compiled", lambda function, form: forms.append(form) or compiled(function, form))
        for longest, used, pieces in ((61, set(), [60]), (60, {fused.Form.PROMPT}, [16, 16, 16, 12])):
            patched.setattr(prompts, "_LONG", longest)
            with prompts.long_prompt(model, *ids.shape), torch.no_grad():
                torch.testing.assert_close(model(ids).logits, want, **tiny.exact(model))
            assert set(forms) == used
            assert read == pieces
            read.clear()
            assert not any("forward" in vars(module) for module in model.modules())


def test_feed_forward_modules_that_something_was_added_to_read_prompts_whole(model, monkeypatch):
    monkeypatch.setattr(prompts, "_PIECE", 16)
    first, *others = (module for module in model.modules() if type(module).__name__.endswith("MLP"))
    first.register_forward_hook(lambda module, args, out: None)
    with prompts._feed_forward_in_pieces(model):
        assert ["forward" in vars(module) for module in (first, *others)] == [False] + [True] * len(others)


@pytest.mark.parametrize("chunk", [None, 20])
def test_generate_reads_long_prompts_so_where_it_replays_steps(model, chunk, monkeypatch):
    """Tokens of one forward count, not those of the prompt."""
    ids, forms, compiled = tiny.tokens(2, 30), [], fused._compiled
    settings = {"max_new_tokens": 2, "cache_implementation": "dynamic", "prefill_chunk_size": chunk}
    want = tiny.generate(model, ids, **settings)
    with monkeypatch.context() as patched:
        patched.setattr(fused, "_compiled", lambda function, form: forms.append(form) or compiled(function, form))
        for replays, longest in ((False, 0), (True, 2 * (chunk or 30) + 1), (True, 2 * (chunk or 30))):
            assert not forms
            patched.setattr(hooks, "can_replay", lambda model, replays=replays: replays)
            patched.setattr(prompts, "_LONG", longest)
            assert torch.equal(tiny.generate(model, ids, **settings), want)
    assert set(forms) == {fused.Form.PROMPT}


def test_other_threads_rotate_as_before(model):
    file = sys.modules[type(model.model.layers[0].self_attn).__mro__[2].__module__]
    stock, entered, left = file.apply_rotary_pos_emb, threading.Barrier(2), threading.Barrier(2)

    def other():
        with fused.fused_steps(model, 2):
            entered.wait()
            left.wait()

    thread = threading.Thread(target=other)
    with fused._compiled_rotations([file], fused.Form.STEP):
        thread.start()
        entered.wait()
        assert file.apply_rotary_pos_emb.__wrapped__ is stock
    assert file.apply_rotary_pos_emb.__wrapped__ is stock
    assert getattr(fused._HERE, "form", None) is None
    left.wait()
    thread.join()
    assert file.apply_rotary_pos_emb is stock


def test_small_models_and_compilers_that_fail_leave_norms_as_they_are(model, monkeypatch, caplog):
    monkeypatch.setattr(fused, "_BACKEND", "no-such-backend")
    fused._compiled.cache_clear()
    for least, said in ((2**29, 0), (0, 1), (0, 1)):
        monkeypatch.setattr(fused, "_LEAST_WEIGHTS", least)
        with fused.fused_steps(model, 2):
            assert not any("forward" in vars(module) for module in model.modules())
        assert len([x for x in caplog.messages if "PyTorch cannot compile them" in x]) == said
