"""Training: labels, checkpointing, caches, packing, dropout and autocast."""

import pytest
import torch
from grids import grid
from models import tiny

import condense

FEW = {
    "llama": ("llama", "cca"),
    "qwen3": ("qwen3", "streaming-6"),
    "gpt2": ("gpt2", "streaming-select-log"),
    "opt": ("opt", "cca"),
    "gpt2-dga": ("gpt2", "dga"),
    "opt-dga": ("opt", "dga-streaming-log"),
    "minicpm3": ("minicpm3", "lca"),
}
IDS = tiny.tokens()
BUDGET = {"rtol": 0, "atol": 1e-11}


def _trainable(name, method, **changes):
    model = condense.apply(tiny.model(name, **changes), tiny.METHODS[method])
    return model.train()


def _gradients(model, ids=IDS, **kwargs):
    """Loss and gradients by name, with the loss of next-token prediction unless labels are given."""
    model.zero_grad()
    loss = model(ids, **({"labels": ids, "use_cache": False} | kwargs)).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_same(a, b):
    torch.testing.assert_close(a[0], b[0], **BUDGET)
    torch.testing.assert_close(a[1], b[1], **BUDGET)


# dropout would differ between calls; it has its own test
_GPT2 = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
NO_DROPOUT = {
    "gpt2": _GPT2,
    "gpt2-layer-scale": _GPT2,
    "opt": {"dropout": 0.0, "attention_dropout": 0.0},
    "phi3": {"resid_pdrop": 0.0},
}


@pytest.mark.parametrize(("name", "method"), tiny.PAIRS.values(), ids=tiny.PAIRS)
def test_every_parameter_learns_with_and_without_cache(name, method):
    model = _trainable(name, method, **NO_DROPOUT.get(name, {}))
    loss, gradients = _gradients(model)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    # a softmax does not notice a constant, so key biases alone may get nothing
    silent = {name for name, grad in gradients.items() if not bool(grad.isfinite().all()) or not bool(grad.any())}
    assert not silent
    _assert_same(_gradients(model, use_cache=True), (loss, gradients))


@grid(8, pair=FEW, reentrant={"reentrant": True, "non-reentrant": False})
def test_gradient_checkpointing_changes_nothing(pair, reentrant):
    name, method = pair
    model = _trainable(name, method, **NO_DROPOUT.get(name, {}))
    ids, mask = tiny.left_padded([tiny.tokens(1, 40)[0], tiny.tokens(1, 61)[0]])
    plain, padded = _gradients(model), _gradients(model, ids, attention_mask=mask)
    tiny.enable_checkpointing(model, reentrant)
    _assert_same(_gradients(model), plain)
    _assert_same(_gradients(model, use_cache=True), plain)
    _assert_same(_gradients(model, ids, attention_mask=mask), padded)
    assert all(bool(grad.isfinite().all()) for grad in padded[1].values())


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_block_that_holds_the_backward_pass_has_the_gradients_of_a_condensed_model(reentrant):
    model = _trainable("llama", "streaming-6")
    want = _gradients(model)
    tiny.enable_checkpointing(condense.restore(model), reentrant)
    with condense.use(model, tiny.METHODS["streaming-6"]):
        _assert_same(_gradients(model), want)


def test_gradients_differ_from_dense():
    model = _trainable("llama", "streaming-6")
    condensed = _gradients(model)[1]["model.layers.0.self_attn.k_proj.weight"]
    dense = _gradients(condense.restore(model))[1]["model.layers.0.self_attn.k_proj.weight"]
    assert (condensed - dense).abs().max() > 1e-3 * dense.abs().max()


def test_gradient_is_the_slope():
    # all in float64: gpt2, since llama's norms round to float32, and logits, since the loss of transformers does
    model = _trainable("gpt2", "streaming-6").eval()
    weight = model.transformer.h[0].attn.c_attn.weight
    value = model(IDS, use_cache=False).logits.square().mean()
    (gradient,) = torch.autograd.grad(value, weight)
    step = 1e-6 / gradient.norm()
    with torch.no_grad():
        weight += step * gradient
        higher = tiny.logits(model, IDS).square().mean()
        weight -= 2 * step * gradient
        lower = tiny.logits(model, IDS).square().mean()
    torch.testing.assert_close((higher - lower) / (2 * step), gradient.square().sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("how", ["positions", "marks", "marks-with-cache"])
@pytest.mark.parametrize(("name", "method"), [("llama", "streaming-6"), ("llama", "dga"), ("gpt2", "dga")])
def test_packed_documents_train_as_separate_ones(name, method, how, checkpointing):
    model, lengths = _trainable(name, method, **NO_DROPOUT.get(name, {})), (23, 1, 30, 7)
    ids = tiny.tokens(1)
    total = {name: 0 for name, _ in model.named_parameters()}
    for document in ids.split(lengths, dim=1):
        model.zero_grad()
        model(document, use_cache=False).logits.square().sum().backward()
        total = {name: total[name] + p.grad for name, p in model.named_parameters()}
    kwargs = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    if how != "positions":
        marks = torch.tensor([0, 23, 24, 54, 61], dtype=torch.int32)
        kwargs |= {"cu_seq_lens_q": marks, "cu_seq_lens_k": marks, "max_length_q": 30, "max_length_k": 30}
    if checkpointing:
        tiny.enable_checkpointing(model, reentrant=False)
    model.zero_grad()
    model(ids, use_cache=how == "marks-with-cache", **kwargs).logits.square().sum().backward()
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, total, rtol=1e-9, atol=1e-9)


DROPOUTS = {
    "gpt2": NO_DROPOUT["gpt2"] | {"attn_pdrop": 0.5},
    "opt": NO_DROPOUT["opt"] | {"attention_dropout": 0.5},
    "llama": {"attention_dropout": 0.5},
    "deepseek_v3": {"attention_dropout": 0.5},
}


@pytest.mark.parametrize("method", ["cca", "streaming-6", "dense"])
@pytest.mark.parametrize(("name", "changes"), DROPOUTS.items(), ids=DROPOUTS.keys())
def test_attention_dropout_is_seeded_and_for_training_only(name, changes, method):
    model = _trainable(name, method, **changes)

    def loss(seed):
        torch.manual_seed(seed)
        return _gradients(model)

    _assert_same(loss(0), loss(0))
    assert abs(loss(0)[0] - loss(1)[0]) > 1e-6
    model.eval()
    _assert_same(loss(0), loss(1))


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3"])
def test_autocast_trains_and_generates(name):
    model = _trainable(name, "streaming-6", dtype=torch.float32, **NO_DROPOUT.get(name, {}))

    def error():
        """Root mean square of what autocast rounds away of the logits, over that of the logits in float32."""
        want = model(IDS, use_cache=False).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = model(IDS, use_cache=False).logits
        assert got.dtype == torch.bfloat16
        return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, gradients = _gradients(model)
    assert all(bool(grad.isfinite().all()) for grad in gradients.values())
    model.eval()
    with torch.no_grad(), condense.use(model, condense.Dense()):
        of_dense = error()
    with torch.no_grad():
        assert error() <= 2 * of_dense + torch.finfo(torch.bfloat16).eps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = tiny.filled(model, IDS)
        assert tiny.generate(model, IDS).shape == (2, tiny.LENGTH + tiny.NEW)
    assert cache.layers[0].keys.dtype == torch.bfloat16


def test_continuing_in_training_on_a_cache_gets_gradients_of_the_new_part():
    model = _trainable("llama", "cca")
    cache = tiny.filled(model, IDS[:, :40])
    model(IDS[:, 40:], past_key_values=cache).logits.sum().backward()
    assert bool(model.model.layers[0].self_attn.k_proj.weight.grad.any())


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_a_prompts_selection_trains_with_consent_only(name, reentrant):
    model = _trainable(name, "dga", **NO_DROPOUT.get(name, {}))
    condense.apply(model, tiny.SELECT)
    with pytest.raises(ValueError, match="train with selection='streaming' or pass allow_future=True"):
        model(IDS)
    condense.apply(model, tiny.SELECT.replace(allow_future=True))
    plain = _gradients(model)
    assert all(bool(gradient.any()) for gradient in plain[1].values())
    _assert_same(_gradients(model, use_cache=True), plain)
    tiny.enable_checkpointing(model, reentrant)
    _assert_same(_gradients(model), plain)


def test_prompt_summary_trains_with_consent_only():
    model = _trainable("llama", "cca")
    condense.apply(model, tiny.CCA.replace(summary="prompt"))
    with pytest.raises(ValueError, match="train with summary='streaming' or pass allow_future=True"):
        model(IDS)
    tiny.logits(model, IDS)  # inference goes on
    condense.apply(model, tiny.CCA.replace(summary="prompt", allow_future=True))
    assert bool(_gradients(model)[1]["model.layers.0.self_attn.k_proj.weight"].any())
