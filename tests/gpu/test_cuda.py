"""On a CUDA device (collected only there): error budgets, parity of prefill and decode, generation in bfloat16."""

import oracle
import pytest
import torch
from budget import DTYPES, METHODS, SHAPES, band, errors, inputs_for
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

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
    yardstick = oracle.eager(*eager, method=method)  # on the same device: it has its own exp and order of sums
    out = condense.attention(*got, method=method)
    assert bool((errors(out.cpu(), want) <= 2 * errors(yardstick.cpu(), want) + band(want, dtype)).all())
    grads = [
        torch.autograd.grad(result, inputs, weight.to(result))
        for result, inputs in ((want, exact), (yardstick, eager), (out, got))
    ]
    for z, y, x in zip(*grads, strict=True):
        assert bool((errors(x.cpu(), z) <= 2 * errors(y.cpu(), z) + band(z, dtype)).all())


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to("cuda", torch.float64)


@pytest.mark.parametrize("method", [condense.CCA(window=64), STREAMING, condense.LCA(window=64)], ids=str)
def test_decode_equals_prefill_for_300_steps(model, method):
    ids = torch.randint(64, (2, 400), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), condense.use(model, method):
        want = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        cache, parts = DynamicCache(config=model.config), []
        for start, stop in [(0, 100), *((i, i + 1) for i in range(100, 400))]:
            parts.append(
                model(
                    ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=positions[:, start:stop],
                    past_key_values=cache,
                ).logits
            )  # fmt: skip
    difference = (torch.cat(parts, 1) - want).abs() * mask[..., None]
    assert float(difference.max()) < 1e-11


def test_generate_in_bfloat16_on_the_bundled_model():
    model, tokenizer = condense.demo_model(dtype=torch.bfloat16)
    model.to("cuda")
    ids = tokenizer("The number of the quiet bridge is 4821.\n" * 40, return_tensors="pt").input_ids.to("cuda")
    with condense.use(model, STREAMING):
        out = model.generate(ids, max_new_tokens=40, do_sample=False)
    assert out.shape[1] == ids.shape[1] + 40
