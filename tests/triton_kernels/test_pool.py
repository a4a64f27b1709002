"""The summary and pooling kernels, held to float64 by twice the error of the torch backend in the same dtype."""

import functools
import itertools

import pytest
import torch
from lanes import DEVICE, DTYPES, check
from layers import extend
from ops.test_pool import numbers

import condense
from condense.ops import POOLINGS, Chunks, SummaryColumns, SummarySpans, pool_groups, summarize
from condense.ops.triton import limits
from condense.plan import ForwardPlan

WIDTHS = [(24, 16), (16, 40), (80, 80), (40, 0), (16, 1)]
if DEVICE == "cuda":
    WIDTHS += [(64, 64), (96, 64), (128, 128), (192, 128), (256, 256), (288, 256), (576, 0), (576, 512), (1024, 1024)]
# the forward adds one token after another: at 1000 tokens of float32 that was 4 times PyTorch's pairwise error
LONG = [(256, dtype) for dtype in DTYPES] + [(1000, dtype) for dtype in DTYPES if dtype != torch.float32]
# before and after are tokens read, start is where window 0 begins: row by row
ROWS = {
    "fresh": ((3, 3), (0, 0), (37, 37)), "fresh, left padding": ((3, 3), (0, 0), (37, 29)),
    "chunk": ((17, 17), (20, 20), (57, 57)), "chunk, rows apart": ((18, 11), (20, 14), (57, 40)),
    "before the row's start": ((-7, 2), (0, 0), (37, 29)),
}  # fmt: skip


def tensors(*shapes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def columns(starts, G, g):
    """Starts of G groups of g tokens that follow one another from ``starts`` on, row by row."""
    return torch.tensor(starts, device=DEVICE)[:, None] + g * torch.arange(G, device=DEVICE)


def check_pooling(
    dtype, begins=None, *, g=5, G=4, K=2, D=24, Dv=16, start=(3, 0), keys="weighted", values="weighted", lse=False
):
    """begins: the first tokens of groups, row by row; None: they follow one another from ``start`` on."""
    begins = columns(start, G, g) if begins is None else torch.tensor(begins)
    (B, G), N = begins.shape, int(begins.max()) + g + 2
    scored = lse or bool({"weighted", "select"} & {keys, values})
    low = tensors((B, K, N, D), (B, K, N, Dv), dtype=dtype)
    # the summary is float32 whatever the dtype of keys: see to it that all backends choose by the same numbers
    summary = tensors((B, K, G, D), dtype=torch.float32, seed=1)

    def run(backend, k, v, qbar=None):
        where = begins.to(k.device)
        where = int(where[0, 0]) if B == 1 and G > 1 and set(where[0].diff().tolist()) == {g} else where
        how = {"key_pooling": keys, "value_pooling": values, "return_lse": lse, "backend": backend}
        return pool_groups(Chunks(k, v, where, G, g, 0), qbar, scale=D**-0.5, **how)

    weights = tensors((B, K, G, D), (B, K, G, Dv), dtype=dtype, seed=2)[: 2 if Dv else 1]
    weights += tensors((B, K, G), dtype=dtype, seed=3) * lse
    check(run, low + summary * scored, weights)


SPANS = [([0, 3, 9, 20], [2, 4, 12, 23], 3), ([0, 0, 0, 9, 17, 17], [4, 8, 9, 17, 23, 37], 20)]
# every pair of poolings; scores' log-sum-exp; group sizes, one after another and rows apart; widths
POOLED = [{"keys": how, "values": other} for how, other in itertools.product(POOLINGS, POOLINGS)]
SCORED = (("weighted", "weighted"), ("mean", "max"), ("select", "mean"))
POOLED += [{"keys": how, "values": other, "g": 13, "lse": True} for how, other in SCORED]
POOLED += [{"keys": "select", "g": g, "G": 9, "start": start} for g in (1, 3, 7, 16, 20) for start in ((2,), (0, 5))]
POOLED += [{"keys": how, "values": how, "D": D, "Dv": Dv} for how in POOLINGS for D, Dv in WIDTHS]
# as in packed documents, whose last tokens are in no group
APART = {"begins": [[0, 4, 9, 22, 26, 33]], "g": 4, "keys": "select", "lse": True}
POOLED += [APART | {"values": how} for how in ("weighted", "max")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", POOLED, ids=str)
def test_pooling(case, dtype):
    check_pooling(dtype, **case)


@pytest.mark.parametrize(("g", "dtype"), LONG, ids=str)
def test_long_groups(g, dtype):
    check_pooling(dtype, g=g, G=2, K=1, start=(3,), keys="select")


def check_summaries(dtype, rows, *, R=3, D=24, S=4, stride=4, G=6):
    K, windows = 2, SummarySpans(*(numbers(*x) for x in rows), G, S, stride)
    tail = tensors((2, K, 6 if max(rows[1]) else 0, D), dtype=dtype, seed=1)[0]

    def run(backend, q):
        return (summarize(q, tail.to(q), windows, backend=backend),)

    check(run, tensors((2, R * K, 37, D), dtype=dtype), tensors((2, K, G, D), dtype=torch.float32, seed=2))


SUMMARIES = [{"rows": rows, "S": size} for rows in ROWS.values() for size in (1, 3, 4, 13)]
SUMMARIES += [{"rows": ROWS["chunk, rows apart"], "R": R} for R in (1, 2, 4, 7, 12)]
SUMMARIES += [{"rows": ROWS["fresh"], "D": D, "R": 2} for D in sorted({D for D, _ in WIDTHS})]
SUMMARIES += [{"rows": ((0, -11), (0, 0), (37, 25)), "S": 40, "stride": 3, "G": 2}]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SUMMARIES, ids=str)
def test_summaries(case, dtype):
    check_summaries(dtype, **case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_spans_that_are_given_one_by_one(spans, dtype):
    lo, hi, size = spans
    columns = SummaryColumns(torch.tensor(lo, device=DEVICE), torch.tensor(hi, device=DEVICE), size)

    def run(backend, q):
        where = columns._replace(lo=columns.lo.to(q.device), hi=columns.hi.to(q.device))
        return (summarize(q, q.new_zeros(1, 2, 0, 24), where, backend=backend),)

    check(run, tensors((1, 6, 37, 24), dtype=dtype), tensors((1, 2, len(lo), 24), dtype=torch.float32, seed=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 7, 16, 33])
def test_ties_go_to_the_lowest_position(size, dtype):
    one, summary = tensors((2, 2, 3, 1, 40), (2, 2, 3, 40), dtype=dtype)
    k = one.expand(-1, -1, -1, size, -1).flatten(2, 3).to(DEVICE)
    v = torch.arange(size).to(k).repeat(3)[:, None].expand(2, 2, -1, 16)
    options = {"scale": 0.3, "key_pooling": "weighted", "value_pooling": "select", "backend": "triton"}
    _, value = pool_groups(Chunks(k, v, 0, 3, size, 0), summary.float().to(DEVICE), **options)
    assert bool((value == 0).all())


def test_equal_largest_numbers_share_the_gradient():
    k = torch.tensor([1.0, 4.0, 4.0, 2.0, 4.0, -1.0, 0.0])[:, None].repeat(1, 16).expand(1, 1, -1, -1)
    k = k.to(DEVICE, DTYPES[0]).requires_grad_()
    chunks = Chunks(k, k[..., :0], 1, 1, 5, 0)
    key, _ = pool_groups(chunks, None, scale=1.0, key_pooling="max", value_pooling="mean", backend="triton")
    (grad,) = torch.autograd.grad(key.sum() * 6, k)
    assert grad[0, 0, :, 0].tolist() == [0, 2, 2, 0, 2, 0, 0]


def both(k, v, q, start):
    g, G = 4, 3
    windows = SummarySpans(numbers(0, 0), numbers(0, 0), q.shape[2] - start, G, g, g)
    summary = summarize(q, k[:, :, :0].detach(), windows, backend="triton")
    chunks = Chunks(k, v, columns(start.tolist(), G, g), G, g, 0)
    out = pool_groups(chunks, summary, scale=0.2, key_pooling="select", value_pooling="weighted", backend="triton")
    return [*out, *torch.autograd.grad(sum(x.float().square().sum() for x in out), (k, v, q))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_repeats_and_tokens_of_no_group_change_no_bit(dtype):
    """NaN before and behind the groups gets no gradient either."""
    start, drawn = numbers(6, 2), tensors((2, 2, 19, 24), (2, 2, 19, 40), (2, 4, 19, 24), dtype=dtype)
    inputs = [x.to(DEVICE).requires_grad_() for x in drawn]
    want = both(*inputs, start)
    behind = torch.arange(19, device=DEVICE)[:, None] - start.to(DEVICE)[:, None, None, None]
    outside = (behind < 0) | (behind >= 12)
    heads_last = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
    across = [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs]
    poisoned = [x.detach().masked_fill(outside, torch.nan).requires_grad_() for x in inputs]
    for other in (*[inputs] * (50 if DEVICE == "cuda" else 2), heads_last, across, poisoned):
        got = both(*other, start)
        assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))
    for x in got[2:]:
        assert bool((x.masked_fill(~outside, 0) == 0).all())


@pytest.mark.parametrize("summary", ["last", "streaming"])
@pytest.mark.parametrize("queries", [None, 3, 11])
def test_chunks_give_what_one_call_gives(summary, queries):
    method = condense.CCA(group_size=4, window=6, summary=summary, num_summary_queries=queries)
    qkv = [x.to(DEVICE) for x in tensors((2, 6, 40, 24), (2, 2, 40, 24), (2, 2, 40, 16), dtype=DTYPES[0])]
    read = functools.partial(extend, method, scale=0.2, backend="triton")
    whole, _ = read(None, *qkv, plan=ForwardPlan(40, numbers(40, 33)))
    past = None
    for lo, hi in itertools.pairwise([0, 13, 26, 27, 28, 40]):
        plan = ForwardPlan(hi - lo, (numbers(40, 33) - 40 + hi).clamp(0, hi - lo))
        sources, past = read(past, *(x[:, :, lo:hi] for x in qkv), plan=plan)
    # the shorter row's surplus entries are seen by nobody
    num = 8 if summary == "last" else 6
    for x, y in zip(sources.entries[:2], whole.entries[:2], strict=True):
        assert torch.equal(x[0], y[0])
        assert torch.equal(x[1, :, :num], y[1, :, :num])


def test_what_triton_cannot_pool_is_named():
    k = torch.zeros(1, 1, 8, 16, dtype=torch.float64, device=DEVICE)
    settings = {"scale": 1.0, "key_pooling": "mean", "value_pooling": "mean", "backend": "triton"}
    with pytest.raises(ValueError, match=r"^backend 'triton' takes .*float32, got torch.float64; use backend='torch'"):
        pool_groups(Chunks(k, k, 0, 2, 4, 0), None, **settings)
    wide = torch.zeros(1, 1, 8, limits.MAX_POOLING_WIDTH + 1, device=DEVICE)
    with pytest.raises(ValueError, match=r"^backend 'triton' pools head widths up to 1024, got \(1025, 16\)"):
        pool_groups(Chunks(wide, k.float(), 0, 2, 4, 0), None, **settings)
