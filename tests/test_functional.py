"""`condense.attention` equals its definition: every method and setting, ratio, width, length, padding and packing."""

import functools

import oracle
import pytest
import torch

import condense

EXACT = {"rtol": 1e-12, "atol": 1e-12}
METHODS = oracle.PLANS | oracle.PROMPTS

LENGTHS = {
    "one token": 1,
    "g-1": 3,
    "g": 4,
    "g+1": 5,
    "w+g-1": 11,
    "w+g": 12,
    "odd": 63,
    "prime": 97,
}

# B, H, K, D, Dv
HEADS = {
    "ratio1": (2, 2, 2, 8, 8),
    "ratio2": (1, 4, 2, 8, 8),
    "ratio3-wide-values": (1, 6, 2, 5, 11),
    "ratio4-narrow-values": (1, 4, 1, 16, 3),
    "ratio7": (2, 7, 1, 6, 6),
    "width1": (1, 2, 1, 1, 1),
}


@functools.cache
def wanted(shape, method, scale, padding, cu_seqlens):
    return oracle.attention(
        *oracle.random_qkv(*shape), method=method, scale=scale, padding=padding, cu_seqlens=cu_seqlens
    )


def check(backend, shape, method, *, padding=None, cu_seqlens=None, scale=None):
    q, k, v = oracle.random_qkv(*shape)
    want_out, want_lse = wanted(shape, method, scale, padding, cu_seqlens)
    arguments = {
        "method": method,
        "scale": scale,
        "backend": backend,
        "padding": None if padding is None else torch.tensor(padding),
        "cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens),
    }
    out, lse = condense.attention(q, k, v, return_lse=True, **arguments)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, want_out, **EXACT)
    torch.testing.assert_close(lse, want_lse, **EXACT)
    # without the log-sum-exp the torch backend may take another way
    torch.testing.assert_close(condense.attention(q, k, v, **arguments), want_out, **EXACT)


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_attention_every_plan_and_length(backend, method, length):
    check(backend, (1, 2, 1, length, 4, 4), method)


@pytest.mark.parametrize("method", oracle.GRID.values(), ids=oracle.GRID)
def test_attention_pooling_grid(backend, method):
    check(backend, (1, 2, 1, 31, 4, 3), method)


@pytest.mark.parametrize("count", [1, 3, 4, 9], ids=["1", "3", "g", "2g+1"])
@pytest.mark.parametrize("window", [0, 2, 4, 7, 40])
@pytest.mark.parametrize("summary", ["streaming", "prompt"])
def test_attention_num_summary_queries(backend, summary, window, count):
    method = condense.LCA(group_size=4, window=window, summary=summary, num_summary_queries=count)
    check(backend, (1, 2, 2, 33, 4, 4), method)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", ["dense", "streaming_llm", "cca-log_size", "lca", "lca-9-queries"])
def test_attention_heads_and_widths(backend, name, heads):
    B, H, K, D, Dv = heads
    check(backend, (B, H, K, 29, D, Dv), METHODS[name], scale=0.7)


PADDING = {
    "mixed": (0, 5, 36, 17),
    "all padded alike": (9, 9, 9, 9),
    "one row of padding only": (37, 0, 36, 2),
    "padding only": (37, 37, 37, 37),
    "none": (0, 0, 0, 0),
}


@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_attention_left_padding(backend, method, padding):
    check(backend, (4, 4, 2, 37, 4, 5), method, padding=padding)


PACKED = {
    "short": (0, 1, 2, 3),
    "empty in the middle": (0, 20, 20, 41),
    "empty at the ends": (0, 0, 17, 18, 45, 45),
    "one": (0, 33),
    "odd": (0, 15, 16, 47),
}


@pytest.mark.parametrize("cu_seqlens", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_attention_packed(backend, method, cu_seqlens):
    check(backend, (1, 4, 2, cu_seqlens[-1], 4, 5), method, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_attention_index_dtypes(integer):
    q, k, v = oracle.random_qkv(1, 2, 1, 24, 4, 4)
    method = oracle.PLANS["lca"]
    packed = condense.attention(q, k, v, method=method, cu_seqlens=torch.tensor([0, 10, 24], dtype=integer))
    padded = condense.attention(q, k, v, method=method, padding=torch.tensor([10], dtype=integer))
    assert torch.equal(packed[:, :, 10:], padded[:, :, 10:])


@pytest.mark.parametrize("name", ["dense", "streaming_llm", "cca", "lca-log_size", "lca-9-queries"])
def test_attention_blocks_of_real_size(name):
    method = METHODS[name]
    q, k, v = oracle.random_qkv(2, 4, 2, 1300, 8, 8)
    arguments = {"method": method, "padding": torch.tensor([0, 700]), "return_lse": True}
    want = condense.attention(q, k, v, backend="reference", **arguments)
    got = condense.attention(q, k, v, backend="torch", **arguments)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, **EXACT)


def test_attention_method_as_settings():
    q, k, v = oracle.random_qkv(1, 2, 1, 24, 4, 4)
    method = oracle.PLANS["lca"]
    assert torch.equal(condense.attention(q, k, v, method=method.to_dict()), condense.attention(q, k, v, method=method))


def test_attention_auto_is_torch():
    q, k, v = oracle.random_qkv(1, 2, 1, 24, 4, 4)
    method = oracle.PLANS["lca"]
    auto, torch_ = (condense.attention(q, k, v, method=method, backend=name) for name in ("auto", "torch"))
    assert torch.equal(auto, torch_)


def test_attention_returns_output_alone_by_default():
    q, k, v = oracle.random_qkv(1, 2, 1, 5, 4, 4)
    assert isinstance(condense.attention(q, k, v, method=condense.Dense()), torch.Tensor)
