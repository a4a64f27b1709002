"""Recall as a method: its limits, and the same function whole, in chunks, step by step, padded, on latents."""

import pytest
import torch
from grids import grid
from methods import test_parity as parity
from oracles import cases, latent_oracle, oracle
from test_latent import read_in_steps

import condense
from condense import Recall
from condense.latent import UpProjection

EXACT = {"rtol": 1e-12, "atol": 1e-12}
METHODS = cases.RECALLS
# two numbers share a byte, so keys have an even width
EVEN = METHODS | {"store-4": Recall(group_size=4, window=5, num_recall=3, store_bits=4)}


@pytest.mark.parametrize("ratio", [1, 3])
def test_all_groups_open_is_dense_attention(backend, ratio):
    q, k, v = oracle.random_qkv(2, 2 * ratio, 2, 57, 4, 6)
    pads = torch.tensor([0, 11])
    got, want = (
        condense.attention(q, k, v, method=method, backend=backend, padding=pads, return_lse=True)
        for method in (Recall(group_size=4, window=6, num_recall=99), condense.Dense())
    )
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, **EXACT)


@grid(60, method=METHODS, steps=parity.RAGGED)
def test_any_chunks_and_padding_give_what_whole_rows_give(method, steps):
    lengths = [sum(counts) for counts in zip(*steps, strict=True)]
    data = parity.rows(lengths)
    outs = parity.read_in_steps(method, data, steps, "torch")[0]
    for out, (q, k, v), n in zip(outs, data, lengths, strict=True):
        if n:
            want = condense.attention(q, k, v, method=method, scale=parity.SCALE, backend="reference")[0]
            torch.testing.assert_close(out, want, **EXACT)


@pytest.mark.parametrize("method", EVEN.values(), ids=EVEN)
def test_later_tokens_change_nothing_before_them(method):
    q, k, v = oracle.random_qkv(1, 4, 2, 61, 4, 4)
    before = condense.attention(q, k, v, method=method)
    for t in (1, 13, 40, 59):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, t:] += 3
        assert torch.equal(before[:, :, :t], condense.attention(*changed, method=method)[:, :, :t])


@pytest.mark.parametrize("method", EVEN.values(), ids=EVEN)
def test_each_past_token_counts_once(method):
    """Equal keys and no queries: with the log of its size a group counts as its tokens, open or not."""
    method = method.replace(entry_bits=16)
    if method.unchosen == "drop" or method.rep_bias == "none":
        method = method.replace(unchosen="pool", rep_bias="log_size")
    L = 50
    q, k, _ = oracle.random_qkv(1, 2, 1, L, 4, 4)
    v = torch.eye(L, dtype=torch.float64)[None, None]
    out = condense.attention(q * 0, torch.ones_like(k), v, method=method)
    want = torch.ones(L, L, dtype=torch.float64).tril() / torch.arange(1, L + 1)[:, None]
    torch.testing.assert_close(out, want.expand_as(out), **EXACT)


def test_gradcheck():
    inputs = tuple(x.requires_grad_() for x in oracle.random_qkv(1, 2, 1, 17, 2, 2))
    method = Recall(group_size=3, window=2, num_recall=2)
    assert torch.autograd.gradcheck(
        lambda *x: condense.attention(*x, method=method, return_lse=True), inputs, fast_mode=True
    )


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_latents_with_all_groups_open_are_dense(backend):
    tensors = latent_oracle.random(2, 3, 41, (5, 4, 6, 3))
    got, want = (
        condense.latent_attention(*tensors, method=method, backend=backend)
        for method in (Recall(group_size=4, window=6, num_recall=99), condense.Dense())
    )
    torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("steps", [(41,), (7, 1, 13, 2, 1, 17)], ids=str)
@pytest.mark.parametrize("absorb", [True, False, None], ids=["absorbed", "expanded", "chosen"])
@pytest.mark.parametrize("name", ["two-open", "drop", "no-bias", "window0", "weighted", "matched", "a-quarter"])
def test_latents_are_one_kv_head_however_they_are_read(name, absorb, steps):
    """By definition: absorbed queries on keys ``[c ; k_rope]`` and values c, with one choice for all heads."""
    x, d_c = latent_oracle.random(2, 3, 41, (5, 4, 6, 3)), 6
    up = UpProjection(x.w_uk, x.w_uv)
    entries, q = torch.cat([x.c, x.k_rope], -1)[:, None], up.absorb(torch.cat([x.q_nope, x.q_rope], -1))
    want = condense.attention(q, entries, entries[..., :d_c], method=METHODS[name], scale=9**-0.5, backend="reference")
    got, _ = read_in_steps(METHODS[name], x, steps, absorb=absorb)
    torch.testing.assert_close(got, up.project_out(want), **EXACT)


@pytest.mark.parametrize("bits", [8, 4])
def test_stored_latents_in_fewer_bits_are_read_alike(bits):
    method, x = EVEN["store-4"].replace(store_bits=bits), latent_oracle.random(2, 3, 41, (5, 4, 6, 3))
    absorbed, expanded = (read_in_steps(method, x, (41,), absorb=absorb)[0] for absorb in (True, False))
    torch.testing.assert_close(absorbed, expanded, **EXACT)


def test_bad_settings_are_refused():
    for fields, message in (
        ({"num_recall": -1}, "num_recall must be an integer >= 0, got -1"),
        ({"num_recall": 2.5}, "num_recall must be an integer >= 0, or a share of the groups between 0 and 1, got 2.5"),
        ({"unchosen": "keep"}, "unchosen must be one of 'pool', 'drop', got 'keep'"),
    ):
        with pytest.raises(ValueError, match=message):
            Recall(**fields)


def test_what_it_cannot_do_is_refused():
    q, k, v = oracle.random_qkv(1, 2, 1, 40, 4, 4)
    method = METHODS["two-open"]
    with pytest.raises(ValueError, match="backend"):
        condense.attention(q, k, v, method=method, backend="triton")
    with pytest.raises(ValueError, match=r"scale must be > 0 for Recall, .*, got -0\.5"):
        condense.attention(q, k, v, method=method, scale=-0.5)
