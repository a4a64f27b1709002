"""Prefill, chunked prefill and token by token give what one call over the whole row gives, for every method."""

import itertools

import pytest
import torch
from grids import CPU_BACKENDS, grid
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import extend
from oracles import cases, oracle
from two_sources import attend_to

import condense
from condense.methods import NO_FIRST
from condense.ops.tensors.per_row import as_rows, max_row
from condense.plan import ForwardPlan
from condense.state import SLACK, first_needed, num_entries

EXACT = {"rtol": 1e-12, "atol": 1e-12}
K, H, D, Dv = 2, 4, 3, 4
SCALE = D**-0.5


def rows(lengths, seed=0):
    return [oracle.random_qkv(1, H, K, max(n, 1), D, Dv, seed=seed + i) for i, n in enumerate(lengths)]


def read_in_steps(method, data, steps, backend):
    """Out and lse per row, and the past. steps: per call, the number of new tokens of each row; the rest is NaN."""
    B = len(data)
    position, past, outs, lses = [0] * B, None, [[] for _ in data], [[] for _ in data]
    for counts in steps:
        L = max(1, *counts)
        q, k, v = (torch.full((B, n, L, d), torch.nan).double() for n, d in ((H, D), (K, D), (K, Dv)))
        for b, n in enumerate(counts):
            for x, whole in zip((q, k, v), data[b], strict=True):
                x[b, :, L - n :] = whole[0, :, position[b] : position[b] + n]
            position[b] += n
        plan = ForwardPlan(L, torch.tensor(counts))
        sources, past = extend(method, past, q, k, v, scale=SCALE, plan=plan, backend=backend)
        out, lse = method.attend(q, sources, scale=SCALE, backend=backend, return_lse=True)
        for b, n in enumerate(counts):
            outs[b].append(out[b, :, L - n :])
            lses[b].append(lse[b, :, L - n :])
            assert bool((out[b, :, : L - n] == 0).all())
            assert bool((lse[b, :, : L - n] == -torch.inf).all())
        check_past(method, past, position)
    return [torch.cat(x, 1) for x in outs], [torch.cat(x, 1) for x in lses], past


def check_past(method, past, position):
    """The state keeps what is needed and the slack, in tensors that own their storage."""
    B, seen, first = len(position), past.seen, past.first
    if method.reads_prompt:
        prompt = as_rows(torch.tensor(position) - seen, B)
        assert torch.equal(as_rows(first.num, B), method.num_entries(prompt))
    else:
        assert first == NO_FIRST
        assert as_rows(seen, B).tolist() == position
    for x in past.tensors:
        assert bool(x.isfinite().all()), "NaN of the padding must not have got in"
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
        assert not x.requires_grad
    assert past.entries[0].shape[2] == past.entries[1].shape[2] == max_row(num_entries(method, seen, first.num))
    needed, kept = max_row(seen - first_needed(method, seen)), past.window_k.shape[2]
    assert needed <= kept == past.window_v.shape[2] <= needed + SLACK + method.layout.rule.chunk
    assert past.mean_q.shape[2] <= max(0, method.layout.num_summary - 1 + SLACK)


def check_rows(method, steps, backend, *, prompt=False):
    lengths = [sum(counts) for counts in zip(*steps, strict=True)]
    data = rows(lengths)
    outs, lses, _ = read_in_steps(method, data, steps, backend)
    for b, n in enumerate(lengths):
        if n:
            want, want_lse = oracle.attention(*data[b], method=method, prompt=steps[0][b] if prompt else None)
            torch.testing.assert_close(outs[b], want[0], **EXACT)
            torch.testing.assert_close(lses[b], want_lse[0], **EXACT)


def cut(length, sizes):
    ends = [min(length, n) for n in itertools.accumulate([*sizes, *[sizes[-1]] * length], initial=0)]
    return [(stop - start,) for start, stop in itertools.pairwise(ends) if stop > start]


CHUNKINGS = {
    "token by token": [1], "twos": [2], "groups": [4], "g+1": [5], "prefill then tokens": [23, 1],
    "token then rest": [1, 100], "ragged": [7, 1, 13, 2, 1, 17],
}  # fmt: skip
AFTER = {"tokens": [(22, 9)] + [(1, 1)] * 15, "chunks": [(17, 30), (13, 1), (2, 8), (0, 3)]}
AFTER["a row without a prompt"] = [(0, 25), (30, 0), (4, 9)]
RAGGED = {
    "left-padded prefill, then tokens": [(21, 5, 0, 13)] + [(1, 1, 1, 1)] * 12,
    "ragged chunks": [(9, 4, 1, 0), (3, 0, 8, 2), (0, 0, 0, 1), (5, 11, 2, 7), (1, 1, 1, 1), (0, 9, 4, 3)],
    "nothing new at all": [(9, 2), (0, 0), (12, 1), (0, 0), (1, 17)],
    "one row far behind": [(40, 1), (1, 1), (1, 0), (1, 30)],
    "equal lengths by other ways": [(0, 20), (20, 0), (5, 5), (1, 1)],
}


@grid(72, backend=CPU_BACKENDS, method=cases.PLANS, steps=RAGGED | {name: cut(43, x) for name, x in CHUNKINGS.items()})
def test_extend_any_chunks_equal_one_call(backend, method, steps):
    check_rows(method, steps, backend)


@grid(24, backend=CPU_BACKENDS, method=cases.PROMPTS | cases.SELECTIONS, steps=AFTER)
def test_extend_after_a_prompt_follows_the_streaming_rule(backend, method, steps):
    check_rows(method, steps, backend, prompt=True)


ANY = {
    "cca": st.builds(
        condense.CCA,
        group_size=st.integers(1, 7),
        window=st.integers(0, 12),
        summary=st.sampled_from(["last", "streaming"]),
        num_summary_queries=st.sampled_from([None, 1, 3, 15, 40]),
        key_pooling=st.sampled_from(cases.POOLINGS),
        value_pooling=st.sampled_from(cases.POOLINGS),
        rep_bias=st.sampled_from(["none", "log_size"]),
    ),
    "streaming_llm": st.builds(condense.StreamingLLM, sink=st.integers(0, 9), window=st.integers(1, 20)),
    "lm_infinite": st.builds(condense.LMInfinite, n_global=st.integers(0, 9), window=st.integers(1, 20)),
}


@pytest.mark.parametrize("methods", ANY.values(), ids=ANY)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(data=st.data())
def test_extend_any_method_any_chunks(methods, data):
    method = data.draw(methods)
    B = data.draw(st.integers(1, 3), label="B")
    counts = st.tuples(*[st.integers(0, 14) for _ in range(B)])
    steps = data.draw(st.lists(counts, min_size=1, max_size=6), label="steps")
    check_rows(method, steps, data.draw(st.sampled_from(["torch", "reference"])))


@pytest.mark.parametrize("method", (cases.PLANS | cases.SELECTIONS).values(), ids=cases.PLANS | cases.SELECTIONS)
def test_extend_keeps_nothing_of_the_callers(method):
    data = rows([30])
    want = oracle.attention(*data[0], method=method, prompt=29)[0][:, :, 29:]
    q, k, v = (x[:, :, :29].contiguous() for x in data[0])
    _, past = extend(method, None, q, k, v, scale=SCALE)
    for x in (q, k, v):
        x.fill_(torch.nan)
    q, k, v = (x[:, :, 29:] for x in data[0])
    sources, _ = extend(method, past, q, k, v, scale=SCALE)
    torch.testing.assert_close(attend_to(sources, q, scale=SCALE)[0], want, **EXACT)


def test_extend_leaves_the_old_past_as_it_was_and_trains_through_the_new_tokens_and_not_the_past():
    method, data = cases.PLANS["lca"], rows([31, 31])
    _, _, past = read_in_steps(method, data, [(30, 17)], "torch")
    before = [torch.as_tensor(x).clone() for x in (*past.tensors, past.seen)]
    q, k, v = (torch.cat([row[i][:, :, 30:] for row in data]) for i in range(3))
    for _ in range(2):
        extend(method, past, q, k, v, scale=SCALE)
        after = (*past.tensors, past.seen)
        assert all(torch.equal(x, torch.as_tensor(y)) for x, y in zip(before, after, strict=True))
    q, k, v = (x.requires_grad_() for x in rows([30])[0])
    sources, past = extend(method, None, q, k, v, scale=SCALE)
    kept = attend_to(sources, q, scale=SCALE)[0]
    free = condense.attention(q, k, v, method=method)
    got, want = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (kept, free))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert not any(x.requires_grad for x in past.tensors)
