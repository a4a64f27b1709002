"""`condense.ops.attend` under general spans, per row and per KV head, and under the uniform rule."""

import pytest
import torch
from grids import CPU_BACKENDS, grid
from oracles import oracle
from two_sources import array_spans, two_sources

from condense.ops import Problem, RuleSpans, Source, UniformRule, api, attend, resolve_backend
from condense.ops.backends import BACKENDS, Backend

EXACT = {"rtol": 1e-12, "atol": 1e-12}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# B, H, K, L, M, N
SHAPES = {
    "one query": (1, 2, 1, 1, 3, 5), "decode": (3, 6, 2, 1, 7, 20), "ratio3": (2, 6, 2, 13, 9, 17),
    "ratio7": (1, 7, 1, 20, 4, 11), "no prefix": (2, 4, 4, 15, 0, 15), "no band": (2, 4, 2, 15, 6, 0),
    "nothing at all": (2, 4, 2, 7, 0, 0),
}  # fmt: skip
REFUSED = [
    (CPU, {}, "needs a CUDA device, or TRITON_INTERPRET=1 .*, got cpu"),
    (CUDA, {"dropout_p": 0.1}, "has no attention dropout .* got 0.1"),
    (CUDA, {"dtype": torch.float64}, "takes torch.bfloat16, .*, got torch.float64"),
    (CUDA, {"widths": (64, 72)}, "has kernels for head widths 64, .*, 256, got 64 and 72"),
    (CUDA, {"dropout_p": 0.1, "num_sources": 5}, "has no attention dropout .*, got 0.1; takes .*, got 5"),
]


def sources(B, H, K, L, M, N, D=4, Dv=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, L, D), (B, K, M, D), (B, K, M, Dv), (B, K, N, D), (B, K, N, Dv))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def rising(B, K, L, top, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, top + 1, (B, K, L), generator=generator).sort(-1).values


@grid(42, backend=CPU_BACKENDS, shape=SHAPES, per_head=[False, True], with_bias=[False, True])
def test_attend_array_spans(backend, shape, per_head, with_bias):
    B, H, K, L, M, N = shape
    q, *rest = sources(*shape)
    heads = K if per_head else 1
    # some queries see nothing: raw_start may reach raw_end, rep_end may be 0
    rep_end, starts, ends = rising(B, heads, L, M, 1), rising(B, heads, L, N, 2), rising(B, heads, L, N, 3)
    bounds = (rep_end, torch.minimum(starts, ends), ends)
    bias = torch.linspace(-2, 3, B * K * M, dtype=torch.float64).reshape(B, K, M) if with_bias else None
    keys, spans = two_sources(*rest, bias), array_spans(*bounds)
    want = oracle.entries_and_window(q, *rest, tuple(x.expand(B, K, L) for x in bounds), scale=0.6, bias=bias)
    torch.testing.assert_close(attend(q, keys, spans, scale=0.6, backend=backend, return_lse=True), want, **EXACT)
    alone, none = attend(q, keys, spans, scale=0.6, backend=backend)
    torch.testing.assert_close(alone, want[0], **EXACT)
    assert none is None


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("L", [1, 9])
def test_plain_causal_attention_takes_any_scale(backend, L, scale):
    """The fused attention of PyTorch on a CPU gives NaN for these with ``is_causal=True``."""
    q, *rest = sources(2, 4, 2, L, 0, 9, D=4, Dv=4)
    spans = RuleSpans(UniformRule(chunk=4, window=None), 9 - L, 0)
    last = torch.arange(10 - L, 10).expand(2, 2, L)
    want = oracle.entries_and_window(q, *rest, (last * 0, last * 0, last), scale=scale)
    for return_lse in (False, True):
        out, _ = attend(q, two_sources(*rest), spans, scale=scale, backend=backend, return_lse=return_lse)
        torch.testing.assert_close(out, want[0], **EXACT)


def test_attend_dropout(backend):
    """Dropped weights are made up for on average, each row's on their own; the log-sum-exp knows nothing of it."""
    q, *rest = (x.expand(1000, -1, -1, -1) for x in sources(1, 2, 1, 4, 3, 5))
    spans = RuleSpans(UniformRule(chunk=1, window=None), torch.tensor([1]), torch.tensor([0]))
    options = {"scale": 0.5, "backend": backend, "return_lse": True}
    want, lse = attend(q, two_sources(*rest), spans, **options)
    torch.manual_seed(0)
    outs, same = attend(q, two_sources(*rest), spans, dropout_p=0.4, **options)
    error = outs.std(0) / len(outs) ** 0.5
    assert bool(((outs.mean(0) - want[0]).abs() <= 5 * error).all())
    assert bool((outs.std(0) > 0).all())
    assert torch.equal(same, lse)


def test_a_bias_for_all_may_be_any_number_and_heads_must_divide(backend):
    q, *rest = sources(1, 4, 2, 6, 5, 7)
    spans = array_spans(*(torch.full((1, 1, 6), n) for n in (5, 0, 7)))
    biases = (2.0, torch.full((1, 1, 5), 2.0), 2)
    outs = [attend(q, two_sources(*rest, x), spans, scale=0.6, backend=backend)[0] for x in biases]
    torch.testing.assert_close(outs[0], outs[1], **EXACT)
    assert torch.equal(outs[0], outs[2])
    with pytest.raises(ValueError, match=r"heads that divide those of q, 3, got 2"):
        attend(q[:, :3], two_sources(*rest), spans, scale=0.6, backend=backend)


SPANS = array_spans(*(torch.full((1, 1, 6), n) for n in (5, 0, 7)))
ROWS = RuleSpans(UniformRule(chunk=4, window=None), torch.tensor([1, 0, 1]), 0)
# of queries q, entries e and window w
MISFITS = {
    "none": (lambda q, e, w: (q, (), SPANS), "sources must hold the window at least, got none"),
    "rows": (lambda q, e, w: (q[:1], (e, w), SPANS), r"sources\[0\].k must have the rows of q, 1, got shape \(2, "),
    "tokens": (
        lambda q, e, w: (q, (e, Source(w.k, w.v[:, :, :3])), SPANS),
        r"\[1\].v must have the tokens-1\? of .*\(2, 2, 3, 3\)",
    ),
    "dtype": (lambda q, e, w: (q, (e, Source(w.k.half(), w.v)), SPANS), r"sources\[1\].k must have the dtype of q"),
    "device": (lambda q, e, w: (q, (Source(e.k, e.v.to("meta")), w), SPANS), r"sources\[0\].v must be on the device"),
    "bias": (lambda q, e, w: (q, (e._replace(bias=torch.ones(1, 1, 4)), w), SPANS), r"bias must have .* \(2, 2, 5\)"),
    "width": (
        lambda q, e, w: (q, (Source(e.k[0], e.v), w), SPANS),
        r"sources\[0\].k must have 4 dimensions .* got shape",
    ),
    "bias device": (
        lambda q, e, w: (q, (e._replace(bias=torch.ones(1, 1, 5, device="meta")), w), SPANS),
        "bias must be on the device",
    ),
    "one span": (lambda q, e, w: (q, (w,), SPANS), "spans must be one for each source, 1, got 2"),
    "rows of a rule": (lambda q, e, w: (q, (e, w), ROWS), "spans must be of the rows of q, 2, got those of 3"),
    "queries": (lambda q, e, w: (q[:, :, :5], (e, w), SPANS), r"spans\[0\] must have .* \(2, 2, 5\).* got \(1, 1, 6\)"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_sources_and_spans_that_do_not_fit_are_refused_by_name(case):
    change, message = MISFITS[case]
    q, *rest = sources(2, 4, 2, 6, 5, 7)
    attend(q, two_sources(*rest), SPANS, scale=0.6)
    with pytest.raises(ValueError, match=message):
        attend(*change(q, *two_sources(*rest)), scale=0.6)


@pytest.mark.parametrize(("device", "changes", "message"), REFUSED, ids=["CPU", "dropout", "dtype", "width", "all"])
def test_triton_is_refused_where_it_cannot_run_and_auto_does_without(device, changes, message):
    options = {"dtype": torch.bfloat16, "widths": (128, 128), **changes}
    with pytest.raises(ValueError, match=f"^backend 'triton' {message}; use backend='torch'"):
        resolve_backend("triton", Problem(device, **options))
    assert resolve_backend("auto", Problem(device, **options)) == "torch"
    one = Problem(CUDA, torch.bfloat16, (128, 128), num_queries=1)
    assert resolve_backend("auto", one._replace(num_queries=2)) == resolve_backend("triton", one) == "triton"
    assert resolve_backend("auto", one) == "torch"


def test_auto_leaves_plain_causal_attention_to_pytorch(monkeypatch):
    calls = []
    monkeypatch.setattr(api, "resolve_backend", lambda *args, **kwargs: "triton")
    operations = BACKENDS["torch"].load()._replace(attend=lambda q, *rest, **kwargs: (calls.append(rest), (q, None))[1])
    monkeypatch.setitem(BACKENDS, "triton", Backend(lambda: operations))
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    keys, start = two_sources(k[:, :, :0], v[:, :, :0], k, v), torch.tensor([0])
    whole, windowed = (RuleSpans(UniformRule(chunk=1, window=w, max_chunks=0), start, start) for w in (None, 3))
    out, _ = attend(q, keys, whole, scale=0.5)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
    torch.testing.assert_close(out, want)
    assert not calls
    attend(q, keys, windowed, scale=0.5)
    assert len(calls) == 1
    # PyTorch would ask for a mask
    later = RuleSpans(UniformRule(chunk=1, window=None), torch.tensor([5]), start)
    attend(q[:, :, 5:], keys, later, scale=0.5)
    assert len(calls) == 2
