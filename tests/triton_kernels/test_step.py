"""The decode step against the oracle: interpreted in float32 on a CPU, compiled for every dtype on a GPU."""

import math

import oracle
import pytest
import torch
from budget import band, errors
from condense.functional import attend_to, extend
from condense.ops import triton_step
from condense.ops.step import StepPlan, StepState

import condense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plan_of(method):
    bias = math.log(method.group_size) if getattr(method, "rep_bias", "none") == "log_size" else 0.0
    poolings = (getattr(method, f"{name}_pooling", "select") for name in ("key", "value"))
    return StepPlan(method.rule, method.lag, method.num_summary, *poolings, bias)


def empty_state(method, B, K, D, Dv, tokens, *, dtype, spare=0):
    """Room for ``tokens`` per row, NaN in every slot."""
    rule = method.rule
    M = rule.visible_entries(tokens // rule.chunk) + spare
    W = tokens if rule.window is None else rule.window + rule.chunk + spare
    sizes = ((M, D), (M, Dv), (W, D), (W, Dv), (method.num_summary, D))
    slots = (torch.full((B, K, *size), torch.nan, dtype=dtype, device=DEVICE) for size in sizes)
    return StepState(*slots, torch.zeros(B, dtype=torch.int64, device=DEVICE))


def decode(method, q, k, v, state, *, arrivals=None, scale=None):
    """Every token one step; ``arrivals`` bool ``[steps, B]`` says who has one in a step. Outputs ``[B, H, L, Dv]``."""
    B, H, L, D = q.shape
    scale = D**-0.5 if scale is None else scale
    out = q.new_full((B, H, L, v.shape[3]), torch.nan)
    for step in range(L if arrivals is None else len(arrivals)):
        real = torch.ones(B, dtype=torch.bool, device=q.device) if arrivals is None else arrivals[step].to(q.device)
        at = state.seen.clamp(max=L - 1)
        rows = torch.arange(B, device=q.device)
        now = [x[rows, :, at][:, :, None].clone() for x in (q, k, v)]
        for x in now:
            x[~real] = torch.nan
        result = triton_step.step(
            *now, state, plan_of(method), scale=scale, real=None if arrivals is None else real
        )
        assert bool((result[~real] == 0).all())
        out[rows[real], :, at[real]] = result[real][:, :, 0]
    return out


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch):
    """What a split does not write must not be read."""
    original = triton_step._scratch
    monkeypatch.setattr(triton_step, "_scratch", lambda *args: tuple(x.fill_(torch.nan) for x in original(*args)))


CASES = {
    "dense": condense.Dense(),
    "streaming_llm": condense.StreamingLLM(sink=3, window=11),
    "streaming_llm-no-sink": condense.StreamingLLM(sink=0, window=5),
    "cca": condense.CCA(group_size=4, window=9),
    "cca-window0": condense.CCA(group_size=3, window=0, rep_bias="log_size"),
    "cca-g1": condense.CCA(group_size=1, window=3),
    "cca-g20": condense.CCA(group_size=20, window=5),
    "streaming": condense.CCA(group_size=4, window=6, summary="streaming"),
    "streaming-window0": condense.CCA(group_size=5, window=0, summary="streaming"),
    "lca-log_size": condense.LCA(group_size=4, window=8, rep_bias="log_size"),
    "lca-1-query": condense.LCA(group_size=4, window=6, num_summary_queries=1),
    "lca-3-queries": condense.LCA(group_size=4, window=6, num_summary_queries=3),
    "lca-9-queries": condense.LCA(group_size=4, window=3, num_summary_queries=9),
    "lca-20-queries": condense.LCA(group_size=4, window=3, num_summary_queries=20),
    "mean-max": condense.LCA(group_size=4, window=6, key_pooling="mean", value_pooling="max"),
    "max-select": condense.CCA(group_size=18, window=2, key_pooling="max", value_pooling="select"),
}


@pytest.mark.parametrize("name", CASES)
def test_sixty_steps_against_the_definition(name):
    method, (B, H, K, L, D, Dv) = CASES[name], (1, 3, 1, 64, 16, 24)
    q, k, v = oracle.random_qkv(B, H, K, L, D, Dv, dtype=torch.float32)
    state = empty_state(method, B, K, D, Dv, L, dtype=torch.float32)
    out = decode(method, *(x.to(DEVICE) for x in (q, k, v)), state)
    want = oracle.attention(q, k, v, method=method)[0]
    # rounded entries, weights and sums: a few units in the last place of the largest value
    assert float((out.cpu().double() - want).abs().max()) <= 16 * torch.finfo(torch.float32).eps * float(v.abs().max())
    assert state.seen.tolist() == [L]
