"""Training: labels, checkpointing, caches, packing, dropout and autocast."""

import pytest
import torch
from grids import grid
from models import tiny
from models.test_apply import in_another_thread

import condense

FEW = {
    "llama": ("llama", "cca"), "qwen3": ("qwen3", "streaming-6"), "gpt2": ("gpt2", "streaming-select-log"),
    "opt": ("opt", "cca"), "gpt2-dga": ("gpt2", "dga"), "opt-dga": ("opt", "dga-streaming-log"),
    "minicpm3": ("minicpm3", "lca"),
}  # fmt: skip
PACKED = {"llama-streaming-6": ("llama", "streaming-6"), "llama-dga": ("llama", "dga"), "gpt2-dga": ("gpt2", "dga")}
PACKED["one-layer-of-latents"] = "deepseek_v3", {1: tiny.STREAMING_6}
IDS = tiny.tokens()
BUDGET = {"rtol": 0, "atol": 1e-11}
# dropout would differ between calls; it has its own test
_GPT2 = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_OPT = {"dropout": 0.0, "attention_dropout": 0.0}
NO_DROPOUT = {"gpt2": _GPT2, "gpt2-layer-scale": _GPT2, "opt": _OPT, "phi3": {"resid_pdrop": 0.0}}
LEARN = tiny.PAIRS | {"sliding": ("qwen2-mixed", tiny.CCA)}


def _trainable(name, method, **changes):
    model = tiny.model(name, **NO_DROPOUT.get(name, {}) | changes)
    return condense.apply(model, tiny.METHODS[method] if isinstance(method, str) else method).train()


def _gradients(model, ids=IDS, run=torch.Tensor.backward, **kwargs):
    model.zero_grad()
    loss = model(ids, **({"labels": ids, "use_cache": False} | kwargs)).loss
    run(loss)
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_same(a, b):
    torch.testing.assert_close(a, b, **BUDGET)


@pytest.mark.parametrize(("name", "method"), LEARN.values(), ids=LEARN)
def test_every_parameter_learns_with_and_without_cache(name, method):
    model = _trainable(name, method)
    loss, gradients = _gradients(model)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    # a softmax does not notice a constant, so key biases alone may get nothing
    silent = {name for name, grad in gradients.items() if not bool(grad.isfinite().all()) or not bool(grad.any())}
    assert not silent
    _assert_same(_gradients(model, use_cache=True), (loss, gradients))


@grid(8, pair=FEW, reentrant={"reentrant": True, "non-reentrant": False})
def test_gradient_checkpointing_changes_nothing(pair, reentrant):
    name, method = pair
    model = _trainable(name, method)
    ids, mask = tiny.left_padded([tiny.tokens(1, 40)[0], tiny.tokens(1, 61)[0]])
    plain, padded = _gradients(model), _gradients(model, ids, attention_mask=mask)
    tiny.enable_checkpointing(model, reentrant)
    _assert_same(_gradients(model), plain)
    _assert_same(_gradients(model, use_cache=True), plain)
    _assert_same(_gradients(model, ids, attention_mask=mask), padded)
    assert all(bool(grad.isfinite().all()) for grad in padded[1].values())


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_block_that_holds_the_backward_pass_has_the_gradients_of_a_condensed_model(reentrant):
    """Also where another thread runs layers again, as autograd's threads do on GPUs."""
    model = _trainable("llama", "streaming-6")
    want = _gradients(model)
    tiny.enable_checkpointing(condense.restore(model), reentrant)
    with condense.use(model, tiny.METHODS["streaming-6"]):
        _assert_same(_gradients(model), want)
        _assert_same(_gradients(model, run=lambda loss: in_another_thread(loss.backward)), want)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("how", ["positions", "positions-with-cache", "marks", "marks-with-cache"])
@pytest.mark.parametrize(("name", "method"), PACKED.values(), ids=PACKED)
def test_packed_documents_train_as_separate_ones(name, method, how, checkpointing):
    model, lengths = _trainable(name, method), (23, 1, 30, 7)
    ids = tiny.tokens(1)
    total = {name: 0 for name, _ in model.named_parameters()}
    for document in ids.split(lengths, dim=1):
        model.zero_grad()
        model(document, use_cache=False).logits.square().sum().backward()
        total = {name: total[name] + p.grad for name, p in model.named_parameters()}
    kwargs = tiny.packed(lengths, how.removesuffix("-with-cache"))
    if checkpointing:
        tiny.enable_checkpointing(model, reentrant=False)
    model.zero_grad()
    model(ids, use_cache=how.endswith("-with-cache"), **kwargs).logits.square().sum().backward()
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, total, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["cca", "streaming-6", "dense"])
@pytest.mark.parametrize("name", ["opt", "llama", "deepseek_v3", "gpt2"])
def test_attention_dropout_is_seeded_and_for_training_only(name, method):
    model = _trainable(name, method, **{"attn_pdrop" if name == "gpt2" else "attention_dropout": 0.5})

    def loss(seed):
        torch.manual_seed(seed)
        return _gradients(model)

    _assert_same(loss(0), loss(0))
    assert abs(loss(0)[0] - loss(1)[0]) > 1e-6
    model.eval()
    _assert_same(loss(0), loss(1))


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3"])
def test_autocast_trains_and_generates(name):
    model = _trainable(name, "streaming-6", dtype=torch.float32)

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
    with torch.no_grad():
        with condense.use(model, condense.Dense()):
            of_dense = error()
        assert error() <= 2 * of_dense + torch.finfo(torch.bfloat16).eps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = tiny.filled(model, IDS)
        assert tiny.generate(model, IDS).shape == (2, tiny.LENGTH + tiny.NEW)
    assert cache.layers[0].state.window_k.dtype == torch.bfloat16


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("case", ["prompt-summary", "prompt-summary-latents", "select", "select-gpt2", "select-opt"])
def test_what_reads_prompts_whole_trains_with_consent_only(case, reentrant):
    name, method = tiny.WHOLE[case]
    model = _trainable(name, method)
    tiny.refused(r"train with (summary|selection)='streaming' or pass allow_future=True", model, IDS)
    tiny.logits(model, IDS)  # inference goes on
    condense.apply(model, method.replace(allow_future=True))
    plain = _gradients(model)
    assert all(bool(gradient.any()) for gradient in plain[1].values())
    _assert_same(_gradients(model, use_cache=True), plain)
    tiny.enable_checkpointing(model, reentrant)
    _assert_same(_gradients(model), plain)
