"""What the torch backend keeps is linear in the number of tokens, and computing it again changes nothing."""

import pytest
import torch
from oracles import oracle
from two_sources import attend_to

import condense
from condense.functional import read_whole
from condense.ops.torch import attend as torch_attend

METHOD = condense.LCA(group_size=4, window=16, rep_bias="log_size")


def kept_for_backward(length):
    """Bytes of the storages that a forward pass keeps."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    inputs = [x.requires_grad_() for x in oracle.random_qkv(1, 2, 1, length, 8, 8, dtype=torch.float32)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = condense.attention(*inputs, method=METHOD, backend="torch")
    kept = sum(storage.nbytes() for storage in storages.values())
    out.sum().backward()
    return kept


def test_gradients_keep_linear_memory(monkeypatch):
    monkeypatch.setattr(torch_attend, "_block_size", lambda device, ratio: 16)
    small, large = kept_for_backward(1024), kept_for_backward(4096)
    assert large <= 4.1 * small
    monkeypatch.setattr(torch_attend, "_MAX_KEPT", 10**9)
    assert kept_for_backward(4096) > 4 * large


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_recomputed_blocks_give_the_same_gradients(monkeypatch, dtype):
    monkeypatch.setattr(torch_attend, "_block_size", lambda device, ratio: 8)
    results = []
    for limit in (0, 10**9):
        monkeypatch.setattr(torch_attend, "_MAX_KEPT", limit)
        inputs = [x.requires_grad_() for x in oracle.random_qkv(2, 4, 2, 60, 4, 4, dtype=dtype)]
        out, lse = condense.attention(
            *inputs, method=METHOD, backend="torch", return_lse=True, padding=torch.tensor([0, 21])
        )
        loss = out.float().square().sum() + lse[lse > -torch.inf].sum()
        results.append((out, lse, *torch.autograd.grad(loss, inputs)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("limit", [0, 10**9], ids=["recomputed", "kept"])
def test_dropout_drops_the_same_weights_in_the_backward_pass(monkeypatch, limit):
    """Outputs are linear in the values, whatever was dropped: out . w = v . gradient."""
    monkeypatch.setattr(torch_attend, "_block_size", lambda device, ratio: 8)
    monkeypatch.setattr(torch_attend, "_MAX_KEPT", limit)
    q, k, v = oracle.random_qkv(1, 4, 2, 60, 4, 4)
    v.requires_grad_()
    method = condense.CCA(group_size=4, window=8)
    sources = read_whole(method, q, k, v, scale=0.5)
    out, _ = attend_to(sources, q, scale=0.5, dropout_p=0.3, backend="torch")
    weight = torch.randn_like(out)
    (gradient,) = torch.autograd.grad((out * weight).sum(), v)
    torch.testing.assert_close((v * gradient).sum(), (out * weight).sum(), rtol=1e-12, atol=1e-12)
