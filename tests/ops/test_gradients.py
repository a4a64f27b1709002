"""Gradients through output and log-sum-exp, what must not harm them, and the memory that is kept for them."""

import pytest
import torch
from grids import CPU_BACKENDS, grid
from layers import read_whole
from oracles import cases, oracle
from two_sources import array_spans, attend_to, two_sources

import condense
from condense.ops import NO_EXTRAS, Extras, attend
from condense.ops.torch import attend as torch_attend

EXACT = {"rtol": 1e-10, "atol": 1e-12}
AHEAD = cases.PROMPTS | cases.SELECTIONS
METHODS = cases.PLANS | {f"{name}-allowed": method.replace(allow_future=True) for name, method in AHEAD.items()}
# a store of fewer bits keeps no gradients
RECALLS = {f"recall-{name}": method for name, method in cases.RECALLS.items() if method.store_bits == 16}
ALL = METHODS | RECALLS
METHOD = condense.LCA(group_size=4, window=16, rep_bias="log_size")


def leaves(*shape, **options):
    return tuple(x.requires_grad_() for x in oracle.random_qkv(*shape, **options))


@grid(24, backend=CPU_BACKENDS, method=METHODS)
def test_outputs_and_gradients_equal_the_definitions(backend, method):
    inputs, results = leaves(2, 4, 2, 33, 4, 3), []
    weight, lse_weight = torch.randn(2, 4, 33, 3).double(), torch.randn(2, 4, 33).double()
    given = {"method": method, "backend": backend, "return_lse": True, "padding": torch.tensor([0, 9])}
    want = oracle.attention(*inputs, method=method, padding=(0, 9))
    for out, lse in (condense.attention(*inputs, **given), want):
        loss = (out * weight).sum() + (lse * lse_weight)[lse > -torch.inf].sum()
        results.append((out, lse, *torch.autograd.grad(loss, inputs)))
    torch.testing.assert_close(*results, **EXACT)


@pytest.mark.parametrize("backend", ["reference", "torch-blocks"], indirect=True)
@pytest.mark.parametrize("method", RECALLS.values(), ids=RECALLS)
def test_outputs_and_gradients_of_recall_equal_the_definitions(backend, method):
    test_outputs_and_gradients_equal_the_definitions(backend, method)


@grid(36, backend=CPU_BACKENDS, method=ALL, pads=[(3, 0), (40, 7), (22, 40)], poison=[torch.nan, torch.inf, 1e300])
def test_poisoned_padding_reaches_nothing(backend, method, pads, poison):
    clean, padding, results = leaves(2, 4, 2, 40, 4, 3), torch.tensor(pads), []
    is_padding = torch.arange(40)[:, None] < padding[:, None, None, None]
    dirty = [x.detach().masked_fill(is_padding, poison).requires_grad_() for x in clean]
    for inputs in (clean, dirty):
        out, lse = condense.attention(*inputs, method=method, backend=backend, padding=padding, return_lse=True)
        loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
        results.append((out, lse, *torch.autograd.grad(loss, inputs)))
    assert all(map(torch.equal, *results))
    out, lse, *grads = results[1]
    for b, n in enumerate(pads):
        assert bool((out[b, :, :n] == 0).all())
        assert bool((lse[b, :, :n] == -torch.inf).all())
        assert all(bool((grad[b, :, :n] == 0).all()) for grad in grads)


@pytest.mark.parametrize("extras", [NO_EXTRAS, Extras(2.0, torch.randn(4).double())], ids=["plain", "cap and sinks"])
@pytest.mark.parametrize("shape", [(7, 3, 5), (7, 3, 0), (7, 0, 5), (1, 0, 0)], ids=str)
@pytest.mark.parametrize("seen", [0, 1])
def test_rows_that_see_nothing(backend, shape, extras, seen):
    L, M, N = shape
    inputs = [torch.randn(2, n, s, 4, dtype=torch.float64) for n, s in ((4, L), (2, M), (2, M), (2, N), (2, N))]
    inputs[0][0].fill_(torch.nan)
    inputs = [x.requires_grad_() for x in inputs]
    extras = extras if extras.sink_logits is None else extras._replace(sink_logits=extras.sink_logits.requires_grad_())
    none, ends = torch.zeros(2, 1, L, dtype=torch.int64), torch.tensor([[[0]], [[seen]]]).expand(2, 1, L)
    sources, spans = two_sources(*inputs[1:]), array_spans(ends.clamp(max=M), none, ends.clamp(max=N))
    out, lse = attend(inputs[0], sources, spans, scale=0.5, backend=backend, return_lse=True, extras=extras)
    for x, value in ((out, 0), (lse, -torch.inf)):
        assert bool((x[0] == value).all())
        assert bool((x[1] == value).all()) is (seen == 0 or M == N == 0)
    for grad in torch.autograd.grad(out.sum(), inputs, retain_graph=True):
        assert bool((grad[0] == 0).all())
    if extras.sink_logits is not None:
        assert bool(torch.autograd.grad(out.sum(), extras.sink_logits)[0].isfinite().all())


@grid(24, backend=CPU_BACKENDS, method=METHODS)
def test_layouts(backend, method):
    q, k, v = oracle.random_qkv(2, 4, 2, 30, 4, 3)
    k, v, inputs = k[:, :1].expand_as(k), v[:1].expand_as(v), []
    for x in (q, k, v):
        wide = torch.full((x.shape[0], x.shape[2] + 2, 2, x.shape[1], 2 * x.shape[3]), torch.nan, dtype=x.dtype)
        wide[:, 1:-1, 1, :, ::2] = x.transpose(1, 2)
        inputs.append(wide[:, 1:-1, 1, :, ::2].transpose(1, 2))
    contiguous = [x.contiguous().clone().requires_grad_() for x in (q, k, v)]
    want = condense.attention(*contiguous, method=method, backend=backend)
    want_grads = torch.autograd.grad(want.square().sum(), contiguous)
    for case in ((q, k, v), inputs):
        case = [x.detach().requires_grad_() for x in case]
        copies = [x.detach().clone() for x in case]
        got = condense.attention(*case, method=method, backend=backend)
        torch.testing.assert_close(got, want, **EXACT)
        torch.testing.assert_close(torch.autograd.grad(got.square().sum(), case), want_grads, **EXACT)
        assert all(torch.equal(x, y) for x, y in zip(case, copies, strict=True))


@grid(24, backend=CPU_BACKENDS, method=cases.PLANS, dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_huge_logits(backend, method, dtype):
    q, k, v = oracle.random_qkv(2, 4, 2, 60, 8, 8, dtype=dtype)
    inputs, padding = [x.requires_grad_() for x in (q * 50, k, v)], torch.tensor([0, 11])
    out, lse = condense.attention(*inputs, method=method, backend=backend, padding=padding, return_lse=True)
    (out.float().square().sum() + lse[:, :, 11:].sum()).backward()
    assert bool(out.isfinite().all())
    assert bool(lse[:, :, 11:].isfinite().all())
    assert all(bool(x.grad.isfinite().all()) for x in inputs)


def test_one_huge_key(backend):
    """Its product with a query is no number of float16: in the window, and when its group is pooled."""
    q, k, v = oracle.random_qkv(1, 2, 1, 60, 8, 8, dtype=torch.float16)
    k[:, :, 33] = 60000.0
    options = {"backend": backend, "scale": 1e-3, "return_lse": True}
    out, lse = condense.attention(q.abs(), k, v, method=cases.PLANS["cca"], **options)
    torch.testing.assert_close(out[:, :, 33], v[:, :, 33].expand(-1, 2, -1))
    assert bool(out.isfinite().all() & lse.isfinite().all())


def kept_for_backward(length):
    storages, inputs = {}, leaves(1, 2, 1, length, 8, 8, dtype=torch.float32)

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

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
        inputs, padding = leaves(2, 4, 2, 60, 4, 4, dtype=dtype), torch.tensor([0, 21])
        out, lse = condense.attention(*inputs, method=METHOD, backend="torch", return_lse=True, padding=padding)
        loss = out.float().square().sum() + lse[lse > -torch.inf].sum()
        results.append((out, lse, *torch.autograd.grad(loss, inputs)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("limit", [0, 10**9], ids=["recomputed", "kept"])
def test_dropout_drops_the_same_weights_in_the_backward_pass(monkeypatch, limit):
    """Outputs are linear in the values, whatever was dropped: out . w = v . gradient."""
    monkeypatch.setattr(torch_attend, "_block_size", lambda device, ratio: 8)
    monkeypatch.setattr(torch_attend, "_MAX_KEPT", limit)
    q, k, v = leaves(1, 4, 2, 60, 4, 4)
    sources = read_whole(condense.CCA(group_size=4, window=8), q, k, v, scale=0.5)
    out, _ = attend_to(sources, q, scale=0.5, dropout_p=0.3, backend="torch")
    weight = torch.randn_like(out)
    (gradient,) = torch.autograd.grad((out * weight).sum(), v)
    torch.testing.assert_close((v * gradient).sum(), (out * weight).sum(), rtol=1e-12, atol=1e-12)


FORWARD = {x: condense.Recall(group_size=4, window=6, num_recall=2, unchosen=x) for x in ("mean", "drop")}
FORWARD |= {f"{bits} bits": condense.CCA(group_size=4, window=6, entry_bits=bits) for bits in (8, 4)}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own
@pytest.mark.parametrize("method", FORWARD.values(), ids=FORWARD)
def test_forward_mode_gives_the_gradients_of_the_backward_pass(method):
    inputs, tangents = (oracle.random_qkv(1, 2, 2, 40, 6, 6, seed=seed) for seed in (1, 2))

    def attention(q, k, v):
        return condense.attention(q, k, v, method=method, backend="reference")

    out, tangent = torch.func.jvp(attention, tuple(inputs), tuple(tangents))
    _, pull = torch.func.vjp(attention, *inputs)
    back = sum((x * y).sum() for x, y in zip(pull(out), tangents, strict=True))
    torch.testing.assert_close((tangent * out).sum(), back)


@pytest.mark.parametrize("method", [METHOD.replace(rep_bias="matched"), FORWARD["mean"]], ids=["matched", "recall"])
def test_transforms_of_torch_func_take_methods_whose_blocks_are_computed_again(method):
    inputs = leaves(1, 2, 1, 140, 4, 4)

    def loss(q, k, v):
        return condense.attention(q, k, v, method=method).square().sum()

    assert torch.equal(torch.func.grad(loss)(*inputs), torch.autograd.grad(loss(*inputs), inputs[0])[0])
