"""No output depends on a later token: what makes training valid and prefill equal to decode."""

import pytest
import torch
from grids import CPU_BACKENDS, grid
from oracles import cases, oracle

import condense

LENGTH = 45
PADDING = torch.tensor([0, 6])


def run(method, backend, q, k, v):
    return condense.attention(q, k, v, method=method, backend=backend, padding=PADDING, return_lse=True)


@grid(36, backend=CPU_BACKENDS, method=cases.PLANS, dtype={"float64": torch.float64, "bfloat16": torch.bfloat16})
def test_a_changed_token_leaves_earlier_outputs_bit_equal(backend, method, dtype):
    inputs = oracle.random_qkv(2, 4, 2, LENGTH, 4, 4, dtype=dtype)
    before = run(method, backend, *inputs)
    for t in (1, 7, 8, 12, 13, 19, 20, 31, 32, 44):
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[:, :, t] = 100 * x[:, :, t].flip(-1) + 1
        after = run(method, backend, *changed)
        for x, y in zip(before, after, strict=True):
            assert torch.equal(x[:, :, :t], y[:, :, :t])
        assert not torch.equal(before[0][:, :, t], after[0][:, :, t])


@pytest.mark.parametrize("name", ["dense", "streaming_llm", "cca-log_size", "lca-3-queries"])
def test_a_changed_token_leaves_earlier_outputs_bit_equal_without_lse(backend, name):
    q, k, v = oracle.random_qkv(2, 4, 2, LENGTH, 4, 4, dtype=torch.float32)
    method = cases.PLANS[name]
    before = condense.attention(q, k, v, method=method, backend=backend)
    for t in (1, 19, 32):
        changed = [torch.cat([x[:, :, :t], 100 * x[:, :, t:] + 1], dim=2) for x in (q, k, v)]
        after = condense.attention(*changed, method=method, backend=backend)
        assert torch.equal(before[:, :, :t], after[:, :, :t])


@grid(24, backend=CPU_BACKENDS, method=cases.PLANS)
def test_gradients_of_later_tokens_are_exactly_zero(backend, method):
    inputs = [x.requires_grad_() for x in oracle.random_qkv(2, 4, 2, LENGTH, 4, 4)]
    out, lse = run(method, backend, *inputs)
    for i in (7, 11, 12, 20, 32):
        loss = out[:, :, i].square().sum() + lse[:, :, i].sum()
        for x in torch.autograd.grad(loss, inputs, retain_graph=True):
            assert bool((x[:, :, i + 1 :] == 0).all())
            assert bool((x[:, :, i] != 0).any())


AHEAD = cases.PROMPTS | {
    name: method for name, method in cases.SELECTIONS.items() if name in ("select", "select-log_size")
}


@pytest.mark.parametrize("method", AHEAD.values(), ids=AHEAD)
def test_what_uses_the_whole_prompt_does_look_ahead(backend, method):
    q, k, v = oracle.random_qkv(1, 2, 1, LENGTH, 4, 4)
    before = condense.attention(q, k, v, method=method, backend=backend)
    q[:, :, -1] *= -5
    after = condense.attention(q, k, v, method=method, backend=backend)
    assert not torch.equal(before[:, :, 20:-1], after[:, :, 20:-1])
    assert method.layout.lookahead
