"""Additions of models to attention (soft caps, sink logits) and packed documents in the kernels: interpreted in float32
on a CPU, on a GPU in every dtype and for Hopper too.

Held to the definition in float64, documents one by one, by twice the error of the torch backend in the same dtype.
"""

import lanes
import pytest
import torch
from extras_cases import METHODS, SCALE, B, Dv, H, L, context_of, every_kind, qkv, steps
from lanes import DEVICE
from oracles import oracle
from speed.budget import judge

import condense
from condense.caches import store
from condense.functional import extend
from condense.ops import Extras
from condense.ops.hopper import limits as hopper_limits
from condense.ops.triton import limits
from condense.plan import ForwardPlan

CASES = [("cca", torch.float32), ("recall", torch.float32)]
if DEVICE == "cuda":  # of bfloat16 keys, which groups are open is up to rounding
    CASES.append(("cca", torch.bfloat16))
KINDS = ("cap", "both") if DEVICE == "cpu" else tuple(every_kind())


def decode_by(monkeypatch, backend):
    """Steps of static caches take this backend, on any device."""
    monkeypatch.setattr(store, "step_backend", lambda *args, **kwargs: backend)


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
    *inputs, extras = *qkv(torch.float32), every_kind(torch.float32)[kind]

    def call(backend, q, k, v, z):
        context, given = context_of(METHODS[name], q, k, v), extras._replace(sink_logits=z)
        return METHODS[name].attend(q, context, scale=SCALE, backend=backend, extras=given)[:1]

    weight = torch.linspace(-1, 1, B * H * L * Dv).view(B, H, L, Dv)
    lanes.check(call, [*inputs, extras.sink_logits], [weight])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["matched", "recall"])
def test_queries_of_padding_have_no_gradients(name):
    """Whatever numbers they have: those of a soft cap are no numbers there."""
    q, k, v = qkv(torch.float32, DEVICE)
    q[:, :, :3] = torch.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    plan = ForwardPlan(L, torch.full((B,), L - 3))
    context, _ = extend(METHODS[name], None, *inputs, scale=SCALE, plan=plan, backend="triton")
    out, _ = METHODS[name].attend(inputs[0], context, scale=SCALE, backend="triton", extras=Extras(softcap=2.0))
    dq, dk, dv = torch.autograd.grad(out.sum(), inputs)
    assert bool((dq[:, :, :3] == 0).all())
    assert all(bool(x.isfinite().all()) for x in (out, dq, dk, dv))


CUDA = DEVICE == "cuda"
DTYPES = limits.DTYPES if CUDA else [torch.float32]
BACKENDS = ["triton", "hopper"] if CUDA and torch.cuda.get_device_capability() == (9, 0) else ["triton"]
# on a GPU tiles are four times as wide, and so are documents there
SIZE, WIDTH = (8, 128) if CUDA else (1, 16)
PACKED = {
    "last": condense.CCA(group_size=4, window=6 * SIZE),
    "streaming": condense.CCA(group_size=4, window=5 * SIZE, summary="streaming", rep_bias="matched"),
    "more queries": condense.CCA(
        group_size=3, window=2, summary="streaming", num_summary_queries=11, rep_bias="log_size"
    ),
    "sinks": condense.StreamingLLM(sink=3, window=5),
    "dga": condense.DGA(group_size=4, gamma=0.3, window=2, focal="random", rep_bias="log_size"),
}
# one token, whole groups, shorter than the window, across several tiles, an odd rest
LENGTHS = [1, 8 * SIZE, 0, 3, 29 * SIZE, 11 * SIZE + 3]
MARKS = torch.tensor([0, *LENGTHS]).cumsum(0)


# every method in one dtype, one method in every dtype
PACKED_CASES = [
    (name, dtype, backend)
    for name in PACKED
    for dtype in DTYPES
    for backend in BACKENDS
    if (name == "streaming" or dtype == DTYPES[0]) and (backend == "triton" or dtype in hopper_limits.DTYPES)
]


@pytest.mark.parametrize(("name", "dtype", "backend"), PACKED_CASES, ids=str)
def test_documents_within_budget(name, dtype, backend):
    low = oracle.random_qkv(1, 4, 2, int(MARKS[-1]), WIDTH, WIDTH, dtype=dtype)
    weight = oracle.random_qkv(1, 4, 1, int(MARKS[-1]), WIDTH, 1, seed=3)[0].to(dtype)

    def call(backend, *inputs):
        return condense.attention(*inputs, method=PACKED[name], cu_seqlens=MARKS, backend=backend, return_lse=True)

    lanes.check(call, low, [weight, torch.ones(weight.shape[:3])], backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_no_tile_reads_keys_of_an_earlier_document(backend):
    """NaN there would reach every query of a tile that reads it, masked or not."""
    dtype, length = torch.bfloat16 if CUDA else torch.float32, 32 * SIZE
    q, k, v = (x.to(DEVICE) for x in oracle.random_qkv(1, 4, 2, 3 * length, WIDTH, WIDTH, dtype=dtype))
    marks = torch.tensor([0, length, 2 * length, 3 * length])
    k[:, :, :length], v[:, :, :length] = torch.nan, torch.nan
    out = condense.attention(q, k, v, method=PACKED["sinks"], cu_seqlens=marks, backend=backend)
    assert bool(out[:, :, length:].isfinite().all())
