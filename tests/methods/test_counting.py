"""Every past token counts exactly once; in the window baselines, those that are kept.

With equal scores and the value of token i a one at place i, an output *is* the weight of every token.
"""

import math

import pytest
import torch
from grids import CPU_BACKENDS, grid
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import cases, oracle

import condense
from condense import CCA, LCA, Dense, LMInfinite, StreamingLLM

EXACT = {"rtol": 1e-12, "atol": 1e-12}
PROPERTY = settings(derandomize=True, deadline=None, max_examples=40)


def weights(method, length, pads, backend, *, equal="queries"):
    """The weight of each token ``[L, L]`` and the lse ``[L]``, positions counted from the first real token."""
    q, k, _ = oracle.random_qkv(1, 2, 1, length + pads, 3, 1)
    if equal == "queries":
        q = torch.zeros_like(q)
    else:
        k, q = torch.ones_like(k) * k[:, :, :1], q * 0.1
    v = torch.zeros(1, 1, length + pads, length, dtype=torch.float64)
    v[0, 0, pads:] = torch.eye(length, dtype=torch.float64)
    out, lse = condense.attention(
        q, k, v, method=method, backend=backend, padding=torch.tensor([pads]), return_lse=True
    )
    offset = 0 if equal == "queries" else (q @ k[:, :, -1:].mT)[..., 0] * 3**-0.5
    return out[0, 0, pads:], (lse - offset)[0, 0, pads:]


@pytest.mark.parametrize("backend", ["reference", "torch"])
@PROPERTY
@given(
    group_size=st.integers(1, 9),
    window=st.integers(0, 20),
    length=st.integers(1, 70),
    pads=st.integers(0, 9),
    summary=st.sampled_from(["last", "streaming", "prompt"]),
    value_pooling=st.sampled_from(["mean", "weighted"]),
    equal=st.sampled_from(["queries", "keys"]),
)
def test_each_past_token_counts_once(backend, group_size, window, length, pads, summary, value_pooling, equal):
    method = CCA(
        group_size=group_size, window=window, summary=summary, value_pooling=value_pooling, rep_bias="log_size"
    )
    got, lse = weights(method, length, pads, backend, equal=equal)
    count = torch.arange(1, length + 1, dtype=torch.float64)
    want = torch.ones(length, length, dtype=torch.float64).tril() / count[:, None]
    torch.testing.assert_close(got, want, **EXACT)
    torch.testing.assert_close(lse, count.log(), **EXACT)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@PROPERTY
@given(group_size=st.integers(1, 9), window=st.integers(0, 20), length=st.integers(1, 70))
def test_without_bias_a_representative_counts_as_one_token(backend, group_size, window, length):
    got, lse = weights(LCA(group_size=group_size, window=window, key_pooling="weighted"), length, 0, backend)
    for t in range(length):
        closed = max(0, t + 1 - window) // group_size
        entries = closed + t + 1 - closed * group_size
        assert math.isclose(lse[t], math.log(entries), rel_tol=1e-12, abs_tol=1e-12)
        want = torch.zeros(length, dtype=torch.float64)
        want[: closed * group_size] = 1 / group_size / entries
        want[closed * group_size : t + 1] = 1 / entries
        torch.testing.assert_close(got[t], want, **EXACT)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@PROPERTY
@given(
    kept=st.integers(0, 9),
    window=st.integers(1, 20),
    length=st.integers(1, 60),
    pads=st.integers(0, 9),
    infinite=st.booleans(),
)
def test_window_baselines_see_exactly_the_kept_tokens(backend, kept, window, length, pads, infinite):
    method = LMInfinite(n_global=kept, window=window) if infinite else StreamingLLM(sink=kept, window=window)
    got, lse = weights(method, length, pads, backend)
    for t in range(length):
        seen = sorted(set(range(min(kept, t + 1))) | set(range(max(0, t + 1 - window), t + 1)))
        want = torch.zeros(length, dtype=torch.float64)
        want[seen] = 1 / len(seen)
        torch.testing.assert_close(got[t], want, **EXACT)
        assert math.isclose(lse[t], math.log(len(seen)), rel_tol=1e-12, abs_tol=1e-12)


def dense(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~torch.ones(q.shape[2], q.shape[2]).tril().bool(), -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("length", [1, 2, 31, 64])
def test_dense_is_ordinary_causal_attention(backend, length):
    q, k, v = oracle.random_qkv(2, 6, 2, length, 8, 5)
    torch.testing.assert_close(condense.attention(q, k, v, method=Dense(), backend=backend), dense(q, k, v), **EXACT)


@grid(36, backend=CPU_BACKENDS, window=[0, 3, 100], summary=["last", "streaming", "prompt"], pooling=cases.POOLINGS)
def test_groups_of_one_are_dense(backend, window, summary, pooling):
    q, k, v = oracle.random_qkv(2, 4, 2, 41, 4, 4)
    method = CCA(
        group_size=1, window=window, summary=summary, key_pooling=pooling, value_pooling=pooling, rep_bias="log_size"
    )
    torch.testing.assert_close(condense.attention(q, k, v, method=method, backend=backend), dense(q, k, v), **EXACT)


@pytest.mark.parametrize(
    "method",
    [
        CCA(group_size=4, window=41),
        LCA(group_size=7, window=1000),
        StreamingLLM(sink=2, window=41),
        StreamingLLM(sink=41, window=1),
        LMInfinite(n_global=0, window=100),
    ],
    ids=str,
)
def test_a_window_over_all_is_dense(backend, method):
    q, k, v = oracle.random_qkv(2, 4, 2, 41, 4, 4)
    torch.testing.assert_close(condense.attention(q, k, v, method=method, backend=backend), dense(q, k, v), **EXACT)


@pytest.mark.parametrize("name", ["cca", "cca-log_size", "cca-window0", "lca", "lca-9-queries", "cca-streaming"])
def test_before_the_first_group_closes_it_is_dense(backend, name):
    method = cases.PLANS[name]
    q, k, v = oracle.random_qkv(2, 4, 2, 41, 4, 4)
    first = method.window + method.group_size - 1
    got = condense.attention(q, k, v, method=method, backend=backend)
    torch.testing.assert_close(got[:, :, :first], dense(q, k, v)[:, :, :first], **EXACT)
    assert not torch.allclose(got[:, :, first], dense(q, k, v)[:, :, first])
