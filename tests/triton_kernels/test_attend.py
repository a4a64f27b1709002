"""The Triton kernels against the oracle."""

import sys

import lanes
import pytest
import torch
import torch.nn.functional as F
from lanes import CUDA, DEVICE, DTYPES
from oracles import oracle
from oracles.cases import METHODS
from two_sources import as_arrays, two_sources

import condense
from condense.ops import ArraySpans, Coarse, RuleSpans, Source, Span, UniformRule, attend
from condense.ops.coarse import CoarseRule
from condense.ops.triton import attend as triton_attend
from condense.ops.triton import attend_call, limits

WIDTH = 128 if CUDA else 16
# B, H, K, L
SHAPES = {"ratio1": (1, 2, 2, 70), "ratio3": (1, 3, 1, 149), "ratio7-padded": (2, 7, 1, 41)}
SMALL = {"group_size": 4, "window": 9}
CASES = {
    "dense": condense.Dense(),
    "streaming_llm": condense.StreamingLLM(sink=3, window=11),
    "cca": condense.CCA(**SMALL),
    "cca-no-window": condense.CCA(group_size=3, window=0, rep_bias="log_size"),
    "streaming-log_size": condense.CCA(**SMALL, summary="streaming", rep_bias="log_size"),
    "matched": condense.CCA(**SMALL, summary="streaming", rep_bias="matched"),
    # focal tokens by lot: a choice by scores is discontinuous, see budget
    "dga": condense.DGA(group_size=5, gamma=0.3, window=2, focal="random", rep_bias="log_size"),
    "dga-select": condense.DGA(
        group_size=4, gamma=0.2, min_focal=7, selection="prompt", focal="random", rep_bias="log_size", allow_future=True
    ),
}
if CUDA:
    CASES |= METHODS
# interpreted, which is slow, every case in one shape and every shape in one case
LATENT_WIDTHS = [(192, 128), (96, 64)]
WIDTHS = [(D, D) for D in limits.WIDTHS if D != WIDTH] if CUDA else [(64, 16), (80, 80)]
WIDTHS += LATENT_WIDTHS
PAIRS = [(name, shape) for name in CASES for shape in SHAPES if CUDA or name == "cca" or shape == "ratio7-padded"]
MATRIX = [(name, shape, DTYPES[0], WIDTH, 24 if not CUDA else WIDTH) for name, shape in PAIRS] + [
    ("streaming-log_size", shape, dtype, *widths)
    for dtype in DTYPES
    for widths, shape in zip(WIDTHS[:: 1 if dtype == DTYPES[0] else 3], list(SHAPES) * len(WIDTHS), strict=False)
]
MATRIX += [("cca", "ratio3", dtype, WIDTH, WIDTH) for dtype in DTYPES[1:]]


def run(method, q, k, v, pads=None, backend="triton", **kwargs):
    padding = None if pads is None else torch.tensor(pads)
    return condense.attention(q, k, v, method=method, padding=padding, backend=backend, **kwargs)


def drawn(*shape):
    return [x.to(DEVICE) for x in oracle.random_qkv(*shape, WIDTH, WIDTH, dtype=DTYPES[0])]


def check(call, low, weight, largest):
    """Within the budget, log-sum-exps within a rounding of the ``largest`` score; these and outputs of the kernels."""
    (_, exact), (out, lse) = lanes.check(call, low, [weight])
    seen = exact.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert bool(((lse - exact)[seen].abs() <= torch.finfo(low[0].dtype).eps * largest).all())
    return out, lse


def largest_norm(*tensors):
    return max(x.double().norm(dim=-1).amax() for x in tensors if x.numel())


@pytest.mark.parametrize(("name", "shape", "dtype", "D", "Dv"), MATRIX, ids=lambda x: str(x))
def test_output_lse_and_gradients_within_budget(name, shape, dtype, D, Dv):
    B, H, K, L = SHAPES[shape]
    L *= 3 if CUDA else 1
    method, pads = CASES[name], None if B == 1 else [0, 13]
    if name == "lca-log_size":  # anchors are discontinuous, see budget
        K = H
    q, k, v = oracle.random_qkv(B, H, K, L, D, Dv, dtype=dtype)
    weight = oracle.random_qkv(B, H, 1, L, Dv, 1, seed=3)[0].to(dtype)

    def call(backend, *inputs):
        return run(method, *inputs, pads, backend, return_lse=True)

    check(call, (q, k, v), weight, largest_norm(q) * largest_norm(k) * D**-0.5)


@pytest.mark.parametrize("window", [2**31 - 60, 2**31 - 1, 2**31, sys.maxsize])
def test_a_window_longer_than_any_text(window):
    """Positions are 32 bits wide there; a window that never ends must not wrap them."""
    inputs, results = [x.requires_grad_() for x in drawn(1, 2, 1, 40)], []
    for method in (condense.CCA(group_size=8, window=window), condense.Dense()):
        out = run(method, *inputs, [3])
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_layouts_poisoned_padding_later_tokens_and_repeats_change_no_bit():
    qkv, method, pads = drawn(2, 4, 2, 60), CASES["streaming-log_size"], [7, 0]
    want = run(method, *qkv, pads)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    for x in strided:
        x[0, :, :7] = torch.nan
    assert torch.equal(run(method, *strided, pads), want)
    assert want.transpose(1, 2).is_contiguous()  # as the output projection reads it
    assert bool((want[0, :, :7] == 0).all())
    for t in (1, 13, 40, 59):
        after = run(method, *(torch.cat([x[:, :, :t], x[:, :, t:] + 1], 2) for x in qkv), pads)
        assert torch.equal(want[:, :, :t], after[:, :, :t])
    inputs, first = [x.requires_grad_() for x in drawn(1, 4, 2, 60)], None
    for _ in range(51 if CUDA else 2):
        out = run(CASES["streaming-log_size"], *inputs)
        results = [out, *torch.autograd.grad(out.float().square().sum(), inputs)]
        first = first or results
        assert all(torch.equal(x, y) for x, y in zip(first, results, strict=True))


# of torch 2.14's own check
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", ["row", "rows", "arrays"])
def test_is_one_well_formed_operation(kind):
    q, k, v = (x.requires_grad_() for x in drawn(2, 4, 2, 20))
    starts = torch.tensor([[0], [-3]]) if kind == "rows" else torch.zeros(1, 1, dtype=torch.int64)
    spans = RuleSpans(UniformRule(4, 5), starts[:, 0], starts[:, 0])
    if kind == "arrays":
        spans = as_arrays(spans, 20, q.device)
    entries_k, entries_v = k[:, :, 3::4].detach().requires_grad_(), v[:, :, 3::4].detach().requires_grad_()
    call = attend_call.call_of(q, two_sources(entries_k, entries_v, k, v, 0.5), spans, 0.3)
    torch.library.opcheck(triton_attend.ATTENTION.operation, tuple(call))
    with torch.no_grad():
        out, lse = triton_attend.ATTENTION.operation(*call)
        # torch.compile may keep the output in another layout than the kernel's
        one, other = (
            triton_attend.attend_backward(x.cos(), lse, x, lse, *call)
            for x in (out, out.clone(memory_format=torch.contiguous_format))
        )
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_without_a_gradient_the_function_inside_the_operation_runs():
    q, k, v = drawn(1, 2, 1, 20)
    spans, keys = RuleSpans(UniformRule(4, 5), 0, 0), two_sources(k[:, :, 3::4], v[:, :, 3::4], k, v)
    results = []
    for learned in (False, True):
        q.requires_grad_(learned)
        assert attend_call.needs_operation(q, k, v) is learned
        results.append(attend(q, keys, spans, scale=0.3, backend="triton", return_lse=True))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def _rising(sizes, B, K, L):
    """Spans that never move back, drawn per row and head; the first queries see nothing."""
    generator = torch.Generator().manual_seed(0)
    spans = []
    for size in sizes:
        lo, hi = (torch.randint(0, size + 1, (B, K, L), generator=generator).sort(-1).values for _ in range(2))
        lo[..., :5], hi[..., :5] = 0, 0
        spans.append(Span(lo, torch.maximum(lo, hi)))
    return ArraySpans(tuple(spans))


@pytest.mark.parametrize("kind", ["two scales", "drawn", "drawn, one empty", "four"])
def test_any_number_of_sources_within_budget(kind):
    dtype, scale, (B, H, K, L, D) = DTYPES[0], 0.2, (2, 6, 2, 71 if CUDA else 47, WIDTH)
    numbers = {"two scales": (4, 16, L), "drawn": (19, 33, 47), "drawn, one empty": (19, 0, 47), "four": (9, 20, 1, 40)}
    sizes = numbers[kind]
    spans = _rising(sizes, B, K, L)
    if kind == "two scales":
        rule = CoarseRule(UniformRule(4, 7), Coarse(4, 27))
        spans = RuleSpans(rule, torch.tensor([0, -13]), torch.tensor([0, 0]))
    q = oracle.random_qkv(B, H, K, L, D, D, dtype=dtype)[0]
    drawn = (oracle.random_qkv(B, K, K, size, D, D, dtype=dtype, seed=n + 1) for n, size in enumerate(sizes))
    keys_and_values = [x for _, *of_source in drawn for x in of_source]
    heads = 1 if kind == "four" else K
    bias = torch.randn(B, heads, sizes[1], generator=torch.Generator().manual_seed(9), dtype=torch.float64).clamp(-4, 4)
    weight = oracle.random_qkv(B, H, 1, L, D, 1, seed=3)[0].to(dtype)

    def call(backend, q, *tensors):
        keys, values, own = tensors[:-1:2], tensors[1:-1:2], tensors[-1]
        if backend == "torch":
            # a column of keys: for their gradients PyTorch computes weights again, as the kernels do, but for those of
            # a mask it keeps them, which is more exact; its kernels on GPUs need widths that are multiples of eight
            q = F.pad(q, (0, 8), value=1 / scale)
            keys, values = ([F.pad(x, (0, 8)) for x in y] for y in (keys, values))
            keys[1], own = keys[1] + F.pad(own[..., None], (D, 7)), None
        sources = [Source(*of) for of in zip(keys, values, [0.7, own, None, -0.4], strict=False)]
        out, lse = attend(q, sources, spans, scale=scale, backend=backend, return_lse=True)
        return out[..., :D], lse

    largest = scale * largest_norm(q) * largest_norm(*keys_and_values[::2]) + 4
    out, lse = check(call, (q, *keys_and_values, bias.to(dtype)), weight, largest)
    if kind != "two scales":
        assert bool((out[:, :, :5] == 0).all())
        assert bool((lse[:, :, :5] == -torch.inf).all())


def test_too_many_sources_are_refused():
    q, k, v = drawn(1, 2, 1, 20)
    spans = _rising([20] * 5, 1, 1, 20)
    with pytest.raises(ValueError, match="'triton' takes up to 4 sources, got 5; use backend='torch'"):
        attend(q, [Source(k, v)] * 5, spans, scale=0.3, backend="triton")


@pytest.mark.parametrize("rows", [[3, 3], [0, 5]], ids=["rows alike", "rows apart"])
def test_entries_ahead_of_the_rules_own(rows):
    """As after a prompt whose entries are there from the start: the rule in registers against the same as arrays."""
    dtype, (L, M, N) = DTYPES[0], (30, 17, 34)
    query_start, offset = torch.tensor([9, 9]), torch.tensor(rows)
    spans = RuleSpans(UniformRule(4, 6), query_start, query_start - (N - L), torch.tensor([0, 2]), offset)
    q = oracle.random_qkv(2, 4, 2, L, WIDTH, WIDTH, dtype=dtype)[0]
    entries_k, entries_v = oracle.random_qkv(2, 2, 2, M, WIDTH, WIDTH, dtype=dtype, seed=1)[:2]
    window_k, window_v = oracle.random_qkv(2, 2, 2, N, WIDTH, WIDTH, dtype=dtype, seed=2)[:2]
    inputs = [x.to(DEVICE).requires_grad_() for x in (q, entries_k, entries_v, window_k, window_v)]
    results = []
    for same in (spans, as_arrays(spans, L, inputs[0].device)):
        out, lse = attend(inputs[0], two_sources(*inputs[1:]), same, scale=0.3, backend="triton", return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out.float().square().sum(), inputs)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert bool(results[0][3][1, :, : rows[1]].any())
