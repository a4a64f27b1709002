"""What models add to attention (sink logits), in the kernels: interpreted in float32 on a CPU, compiled on a GPU."""

import pytest
import torch
from extras_cases import METHODS, SCALE, context_of, logits, qkv, steps, to

from condense.caches import static
from condense.ops import Extras
from condense.ops.recall import api as recall_api

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32,)
EXTRAS = {"sinks": Extras(logits())}


@pytest.fixture(autouse=True)
def stepping(monkeypatch):
    """As on a GPU: "auto" takes the kernels."""
    if DEVICE == "cpu":
        monkeypatch.setattr(static, "step_backend", lambda *args, **kwargs: "triton")
        step = recall_api.recall_step.__kwdefaults__ | {"backend": "triton"}
        monkeypatch.setattr(recall_api.recall_step, "__kwdefaults__", step)


def errors(got, plain, want):
    """Largest errors of the kernels, and of PyTorch in the same dtype."""
    return tuple(float((x.double().cpu() - want).abs().max()) for x in (got, plain))


@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("name", ["cca", "recall"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_and_prompts(name, dtype, extras, monkeypatch):
    method, low = METHODS[name], [x.to(DEVICE) for x in qkv(dtype)]
    low_extras = to(extras, dtype, DEVICE)
    exact = [x.double().cpu() for x in low]
    want = steps_of_torch(method, exact, to(low_extras, torch.float64), monkeypatch)
    plain = steps_of_torch(method, low, low_extras, monkeypatch)
    got, budget = errors(steps(method, *low, low_extras), plain, want)
    assert got <= 2 * budget
    context = context_of(method, *low)
    out = method.attend(low[0], context, scale=SCALE, backend="triton", extras=low_extras)[0]
    got, budget = errors(out, plain, want)
    assert got <= 2 * budget


def steps_of_torch(method, inputs, extras, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(static, "step_backend", lambda *args, **kwargs: "torch")
        patch.setattr(
            recall_api.recall_step, "__kwdefaults__", recall_api.recall_step.__kwdefaults__ | {"backend": "torch"}
        )
        return steps(method, *inputs, extras)


@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("name", ["cca", "recall"])
def test_gradients(name, extras):
    method, grads = METHODS[name], {}
    for backend, dtype in (("torch", torch.float64), ("torch", torch.float32), ("triton", torch.float32)):
        device = "cpu" if dtype == torch.float64 else DEVICE
        inputs = [x.to(device).requires_grad_() for x in qkv(dtype)]
        added = to(extras, dtype, device)
        leaves = [*inputs, *(x.requires_grad_() for x in added if isinstance(x, torch.Tensor))]
        out = method.attend(inputs[0], context_of(method, *inputs), scale=SCALE, backend=backend, extras=added)[0]
        weights = torch.linspace(-1, 1, out.numel(), dtype=dtype, device=device).view_as(out)
        grads[backend, dtype] = torch.autograd.grad((out * weights).sum(), leaves)
    for got, plain, want in zip(
        grads["triton", torch.float32], grads["torch", torch.float32], grads["torch", torch.float64], strict=True
    ):
        error, budget = errors(got, plain, want)
        assert error <= max(2 * budget, 8 * torch.finfo(torch.float32).eps * float(want.abs().max()))
