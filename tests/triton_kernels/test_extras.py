"""Additions of models to attention (soft caps, sink logits) and packed documents in the kernels, for Hopper too."""

import lanes
import pytest
import torch
from lanes import CUDA, DEVICE, DTYPES
from ops.test_extras import METHODS, SCALE, B, Dv, H, L, context_of, every_kind, qkv, steps
from oracles import oracle
from speed.budget import judge

import condense
from condense.caches import store
from condense.functional import extend
from condense.ops import Extras
from condense.ops.hopper import limits as hopper_limits
from condense.plan import ForwardPlan

CASES = [("cca", torch.float32), ("recall", torch.float32)]
if CUDA:  # of bfloat16 keys, which groups are open is up to rounding
    CASES.append(("cca", torch.bfloat16))
KINDS = ("cap", "both") if not CUDA else tuple(every_kind())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_steps_and_prompts(name, dtype, kind, monkeypatch):
    method, inputs, extras, outs = METHODS[name], qkv(dtype, DEVICE), every_kind(dtype, DEVICE)[kind], []
    for backend in ("triton", "torch"):  # of the steps of static caches, on any device
        monkeypatch.setattr(store, "step_backend", lambda *args, backend=backend, **kwargs: backend)
        outs.append(steps(method, *inputs, extras).cpu())
    prompt = method.attend(inputs[0], context_of(method, *inputs), scale=SCALE, backend="triton", extras=extras)[0]
    rounded = extras._replace(sink_logits=None if extras.sink_logits is None else extras.sink_logits.double().cpu())
    want = steps(method, *(x.double().cpu() for x in inputs), rounded)
    for out in (outs[0], prompt.cpu()):
        assert judge([out], [want], outs[1:]).passed


@pytest.mark.parametrize("kind", KINDS[-1:])
@pytest.mark.parametrize("name", ["matched", "recall"])
def test_gradients(name, kind):
    extras, weight = every_kind(torch.float32)[kind], torch.linspace(-1, 1, B * H * L * Dv).view(B, H, L, Dv)

    def call(backend, q, k, v, z):
        context, given = context_of(METHODS[name], q, k, v), extras._replace(sink_logits=z)
        return METHODS[name].attend(q, context, scale=SCALE, backend=backend, extras=given)[:1]

    lanes.check(call, [*qkv(torch.float32), extras.sink_logits], [weight])


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


BACKENDS = ["triton", "hopper"] if CUDA and torch.cuda.get_device_capability() == (9, 0) else ["triton"]
# on a GPU tiles are four times as wide, and so are documents there
SIZE, WIDTH = (8, 128) if CUDA else (1, 16)
MORE_QUERIES = condense.LCA(group_size=3, window=2, num_summary_queries=11, rep_bias="log_size")
PACKED = {
    "last": condense.CCA(group_size=4, window=6 * SIZE),
    "streaming": condense.CCA(group_size=4, window=5 * SIZE, summary="streaming", rep_bias="matched"),
    "more queries": MORE_QUERIES.replace(key_pooling="weighted"),
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
    k[:, :, :length], v[:, :, :length] = torch.nan, torch.nan
    out = condense.attention(q, k, v, method=PACKED["sinks"], cu_seqlens=length * torch.arange(4), backend=backend)
    assert bool(out[:, :, length:].isfinite().all())
