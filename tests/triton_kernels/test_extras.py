"""What models add to attention (soft caps, sink logits) in the kernels: interpreted in float32 on a CPU, compiled on a
GPU.
"""

import pytest
import torch
from extras_cases import METHODS, SCALE, context_of, every_kind, qkv, steps
from speed.budget import judge

from condense.caches import static

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [("cca", torch.float32), ("recall", torch.float32)]
if DEVICE == "cuda":  # of bfloat16 keys, which groups are open is up to rounding
    CASES.append(("cca", torch.bfloat16))
KINDS = ("cap", "both") if DEVICE == "cpu" else tuple(every_kind())


def decode_by(monkeypatch, backend):
    """Steps of static caches take this backend, on any device."""
    monkeypatch.setattr(static, "step_backend", lambda *args, **kwargs: backend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_steps_and_prompts(name, dtype, kind, monkeypatch):
    method, inputs, extras = METHODS[name], qkv(dtype, DEVICE), every_kind(dtype, DEVICE)[kind]
    decode_by(monkeypatch, "triton")
    got = steps(method, *inputs, extras)
    prompt = method.attend(inputs[0], context_of(method, *inputs), scale=SCALE, backend="triton", extras=extras)[0]
    decode_by(monkeypatch, "torch")
    budget = steps(method, *inputs, extras)
    exact = [x.double().cpu() for x in inputs]
    rounded = extras._replace(sink_logits=None if extras.sink_logits is None else extras.sink_logits.double().cpu())
    want = steps(method, *exact, rounded)
    for out in (got, prompt):
        assert judge([out.cpu()], [want], [budget.cpu()]).passed


@pytest.mark.parametrize("kind", KINDS[-1:])
@pytest.mark.parametrize("name", ["matched", "recall"])
def test_gradients(name, kind):
    def gradients(backend, dtype, device):
        inputs, extras = [x.requires_grad_() for x in qkv(dtype, device)], every_kind(dtype, device)[kind]
        leaves = [*inputs, extras.sink_logits.requires_grad_()]
        context = context_of(METHODS[name], *inputs)
        out = METHODS[name].attend(inputs[0], context, scale=SCALE, backend=backend, extras=extras)[0]
        weights = torch.linspace(-1, 1, out.numel(), dtype=dtype, device=device).view_as(out)
        return torch.autograd.grad((out * weights).sum(), leaves)

    want = gradients("torch", torch.float64, "cpu")
    plain, got = (gradients(backend, torch.float32, DEVICE) for backend in ("torch", "triton"))
    assert judge([x.cpu() for x in got], want, [x.cpu() for x in plain]).passed
