"""On a CUDA device (collected only there): error budgets, parity of prefill and decode, generation in bfloat16."""

import pytest
import torch
from layers import extend
from models import tiny
from oracles import oracle
from oracles.cases import DTYPES, METHODS, SHAPES, inputs_for
from oracles.eager import eager_attention
from speed.budget import judge
from two_sources import attend_to

import condense

STREAMING = condense.CCA(group_size=16, window=64, summary="streaming", key_pooling="select", rep_bias="log_size")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_output_and_gradients_within_budget(name, shape, dtype):
    method, low = METHODS[name], inputs_for(name, shape, dtype)
    weight = oracle.random_qkv(1, low[0].shape[1], 1, shape[3], shape[5], 1, seed=3)[0].to(dtype)
    exact, eager, got = (
        [x.to(**target).requires_grad_() for x in low]
        for target in ({"dtype": torch.float64}, {"device": "cuda"}, {"device": "cuda"})
    )
    want = oracle.attention(*exact, method=method)[0]
    # on the same device: it has its own exp and order of sums, and PyTorch's fused kernel has them in float32
    yardstick = eager_attention(*eager, method=method, fused=dtype == torch.float32)
    out = condense.attention(*got, method=method)
    want, yardstick, got = (
        [x.detach().cpu() for x in (result, *torch.autograd.grad(result, inputs, weight.to(result)))]
        for result, inputs in ((want, exact), (yardstick, eager), (out, got))
    )
    assert judge(got, want, yardstick).passed


DECODED = [
    condense.CCA(window=64),
    STREAMING,
    condense.LCA(window=64),
    condense.DGA(),
    condense.DGA(window=64, summary="streaming", rep_bias="log_size"),
]


@pytest.mark.parametrize("method", DECODED, ids=str)
def test_decode_equals_prefill_for_300_steps(method):
    """In float64, without a model around it: stock models compute their norms in float32 whatever they are given."""
    q, k, v = (x.cuda() for x in oracle.random_qkv(2, 4, 2, 400, 64, 64))
    want = condense.attention(q, k, v, method=method)
    past, parts = None, []
    for start, stop in [(0, 100), *((i, i + 1) for i in range(100, 400))]:
        q_now, k_now, v_now = (x[:, :, start:stop] for x in (q, k, v))
        sources, past = extend(method, past, q_now, k_now, v_now, scale=0.125)
        parts.append(attend_to(sources, q_now, scale=0.125)[0])
    assert float((torch.cat(parts, 2) - want).abs().max()) < 1e-12


@pytest.mark.parametrize(
    "method", [STREAMING, condense.DGA(rep_bias="log_size"), condense.DGA(selection="prompt", min_focal=64)], ids=str
)
def test_generate_in_bfloat16_on_the_bundled_model(method):
    model, tokenizer = condense.demo_model(dtype=torch.bfloat16)
    model.to("cuda")
    ids = tokenizer("The number of the quiet bridge is 4821.\n" * 40, return_tensors="pt").input_ids.to("cuda")
    with condense.use(model, method):
        settings = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "cache_implementation": "dynamic"}
        out = model.generate(ids, **settings)
        logits = tiny.in_chunks(model, out, (ids.shape[1], *(1,) * 40))[:, ids.shape[1] - 1 : -1]
    logits[..., model.generation_config.eos_token_id] = -torch.inf
    assert torch.equal(out[:, ids.shape[1] :], logits.argmax(-1))
