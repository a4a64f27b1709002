"""Laws of attention over a prompt. With equal scores and one-hot values an output *is* the weight of every token."""

import math
from functools import cache, partial

import pytest
import torch
from grids import CPU_BACKENDS, grid
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import cases, oracle

import condense
from condense import CCA, DGA, LCA, Dense, LMInfinite, Recall, StreamingLLM
from condense.ops.recall import choice

EXACT = {"rtol": 1e-12, "atol": 1e-12}
PROPERTY = settings(derandomize=True, deadline=None, max_examples=40)
CHANGED = (1, 7, 8, 12, 13, 19, 20, 31, 32, 44)
# two numbers share a byte, so keys and values have an even width
RECALLS = cases.RECALLS | {"store-4": Recall(group_size=4, window=5, num_recall=3, store_bits=4)}
RECALLS["shared"] = RECALLS["store-4"].replace(store_bits=16, prompt="shared", num_recall=0.1, min_recall=5)
LIMITS = [
    Dense(), CCA(group_size=4, window=64), LCA(group_size=7, window=1000), StreamingLLM(sink=2, window=64),
    StreamingLLM(sink=64, window=1), LMInfinite(n_global=0, window=100), Recall(group_size=4, window=6, num_recall=1.0),
    DGA(selection="prompt"), DGA(group_size=4, selection="prompt", gamma=0.2, min_focal=64),
    DGA(group_size=4, selection="prompt", gamma=1), Recall(group_size=4, window=8, num_recall=2, prompt="exact"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def few_own_choices(monkeypatch):
    """Most queries of these texts open what others choose, if the method says so."""
    monkeypatch.setattr(choice, "OWN_CHOICES", 5)


@cache
def dense(heads, length, pads):
    inputs = oracle.random_qkv(2, heads, 2, length, 8, 6)
    return inputs, oracle.attention(*inputs, method=Dense(), padding=(0, pads))


@grid(100, backend=CPU_BACKENDS, method=cases.PLANS | RECALLS, dtype=[torch.float64, torch.float32, torch.bfloat16])
def test_a_changed_token_leaves_earlier_outputs_bit_equal(backend, method, dtype):
    # two rows for each token, of which one is padded
    inputs = [x.repeat(len(CHANGED), 1, 1, 1) for x in oracle.random_qkv(2, 4, 2, 45, 4, 4, dtype=dtype)]
    changed = [x.clone() for x in inputs]
    for x in changed:
        for rows, t in zip(x.split(2), CHANGED, strict=True):
            rows[:, :, t] = 100 * rows[:, :, t].flip(-1) + 1
    attend = partial(condense.attention, method=method, backend=backend, padding=torch.tensor([0, 6] * len(CHANGED)))
    # without the log-sum-exp the torch backend may take another way
    outs = [(attend(*x), *attend(*x, return_lse=True)) for x in (inputs, changed)]
    for number, t in enumerate(CHANGED):
        before, after = ([x[2 * number : 2 * number + 2] for x in out] for out in outs)
        assert all(torch.equal(x[:, :, :t], y[:, :, :t]) for x, y in zip(before, after, strict=True))
        assert not torch.equal(before[0][:, :, t], after[0][:, :, t])


def weights(method, length, pads, backend, *, equal="queries"):
    """The weight of each token ``[L, L]`` and the lse ``[L]``, positions counted from the first real token."""
    q, k, _ = oracle.random_qkv(1, 2, 1, length + pads, 4, 1)
    q, k = (0 * q, k) if equal == "queries" else (0.1 * q, k[:, :, :1].expand_as(k))
    v = torch.nn.functional.pad(torch.eye(length, dtype=torch.float64), (0, 0, pads, 0))[None, None]
    options = {"backend": backend, "padding": torch.tensor([pads]), "return_lse": True}
    out, lse = condense.attention(q, k, v, method=method, **options)
    offset = (q @ k[:, :, -1:].mT)[..., 0] * 4**-0.5
    return out[0, 0, pads:], (lse - offset)[0, 0, pads:]


COUNTED = {
    "cca": st.builds(
        CCA,
        group_size=st.integers(1, 9),
        window=st.integers(0, 20),
        summary=st.sampled_from(["last", "streaming", "prompt"]),
        value_pooling=st.sampled_from(["mean", "weighted"]),
        rep_bias=st.just("log_size"),
    ),
    "dga": st.builds(
        DGA,
        group_size=st.integers(1, 7),
        window=st.sampled_from([0, 1, 5]),
        gamma=st.sampled_from([0, 0.1, 0.37, 0.9, 1]),
        min_focal=st.integers(0, 20),
        selection=st.sampled_from(["streaming", "prompt"]),
        focal=st.sampled_from(["random", "top"]),
        seed=st.integers(0, 10**6),
        rep_bias=st.just("log_size"),
    ),
}


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("methods", COUNTED.values(), ids=COUNTED)
@PROPERTY
@given(data=st.data(), length=st.integers(1, 70), pads=st.integers(0, 9), equal=st.sampled_from(["queries", "keys"]))
def test_each_past_token_counts_once(backend, methods, data, length, pads, equal):
    got, lse = weights(data.draw(methods), length, pads, backend, equal=equal)
    seen = torch.arange(1, length + 1).double()
    torch.testing.assert_close(got, torch.ones_like(got).tril() / seen[:, None], **EXACT)
    torch.testing.assert_close(lse, seen.log(), **EXACT)


@pytest.mark.parametrize("method", RECALLS.values(), ids=RECALLS)
def test_each_past_token_counts_once_in_a_group_open_or_not(method, backend):
    """One by one or, of groups that are not open, by one token, whose value is the mean over all whole groups."""
    method, g = method.replace(unchosen="mean"), method.group_size
    got, lse = weights(method, 50, 0, backend)
    for t in range(50):
        closed = max(0, t + 1 - method.window) // g
        # a group that has closed since another query chose is open too
        shares = method.prompt == "shared" and t < 45
        newer, quota = (closed % 2, method.quota._replace(least=3)) if shares else (0, method.quota)
        # of equal scores the first are opened
        opened, whole = quota.at(closed - newer), (t + 1) // g * g
        want = torch.zeros(50, dtype=torch.float64)
        want[[i for i in range(t + 1) if not opened * g <= i < (closed - newer) * g]] = 1 / (t + 1)
        want[:whole] += (closed - newer - opened) * g / (t + 1) / max(whole, 1)
        torch.testing.assert_close(got[t], want, **EXACT)
        assert math.isclose(lse[t], math.log(t + 1), rel_tol=1e-12, abs_tol=1e-12)


@pytest.mark.parametrize("method", LIMITS, ids=str)
def test_limits_are_ordinary_causal_attention(backend, method):
    """A window over all, all tokens kept, all groups open, all tokens focal; prompts that are read exactly."""
    for heads, length, pads in ((6, 1, 0), (2, 2, 1), (4, 8, 0), (4, 12, 7), (4, 31, 0), (6, 64, 7)):
        (q, k, v), want = dense(heads, length, pads)
        attend = partial(condense.attention, q, k, v, method=method, backend=backend, padding=torch.tensor([0, pads]))
        torch.testing.assert_close(attend(return_lse=True), want, **EXACT)
        # without the log-sum-exp the torch backend may take another way
        torch.testing.assert_close(attend(), want[0], **EXACT)
