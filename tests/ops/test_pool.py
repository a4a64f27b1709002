"""`condense.ops.pool`, `group_scores`, `summarize` and `pool_groups`: every backend of a CPU equals the formulas."""

import pytest
import torch

from condense.ops import POOLINGS, Chunks, SummarySpans, group_scores, pool, pool_groups, summarize

BACKENDS = ["reference", "torch"]
B, H, K, L, D = 2, 6, 2, 23, 5


def numbers(*values):
    return torch.tensor(values, dtype=torch.int64)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", POOLINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_pool_rounds_once(backend, how, dtype):
    x, scores = draw(2, 3, 4, 5, 6, dtype=dtype), draw(2, 3, 4, 5, seed=1, dtype=torch.float32)
    got = pool(x, scores, how=how, backend=backend)
    assert got.dtype == dtype
    want = pool(x.double(), scores.double(), how=how, backend="reference")
    # half a unit in the last place of the result, and for c = 5 weighted terms the usual bound of a float32 sum
    terms = 5 + 2
    band = torch.finfo(dtype).eps / 2 * want.abs() + terms * torch.finfo(torch.float32).eps * x.double().abs().amax(3)
    assert bool(((got.double() - want).abs() <= band).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 7, 16, 33])
def test_select_ties_go_to_the_lowest_position(backend, dtype, size):
    summary = draw(2, 3, 4, 17, dtype=torch.promote_types(dtype, torch.float32))
    k = draw(2, 3, 4, 1, 17, seed=size, dtype=dtype).repeat(1, 1, 1, size, 1)
    scores = group_scores(summary, k, scale=0.25, backend=backend)
    assert bool((scores == scores[..., :1]).all())
    v = torch.arange(size).to(dtype)[:, None].expand(2, 3, 4, size, 1)
    assert bool((pool(v, scores, how="select", backend=backend) == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_mean_query_is_rounded_before_the_window_is_averaged(dtype, backend):
    """So that a cache may keep mean queries: the same, to the bit, whether they come from the tail or are new."""
    q = draw(B, H, L, D, dtype=dtype)
    none = q.new_empty(B, K, 0, D)
    each = summarize(q, none, SummarySpans(numbers(0, 0), numbers(0, 0), numbers(L, L), L, 1, 1), backend=backend)
    means = each.to(dtype)
    assert each.dtype == torch.float32
    assert torch.equal(means.float(), each)
    assert bool(((each - q.float().unflatten(1, (K, 3)).mean(2)).abs() > 0).any())
    windows = SummarySpans(numbers(1, 1), numbers(0, 0), numbers(L, L), 5, 4, 4)
    whole = summarize(q, none, windows, backend=backend)
    later = windows._replace(before=numbers(7, 7))
    assert torch.equal(summarize(q[:, :, 7:], means[:, :, :7], later, backend=backend), whole)
    torch.testing.assert_close(whole, means[:, :, 1:21].float().unflatten(2, (5, 4)).mean(3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pool_groups_past_the_end_are_finite_and_values_may_be_missing(backend):
    both = draw(1, 2, 10, 4).expand(2, -1, -1, -1)
    chunks = Chunks(both, both[..., :0], torch.tensor([[0, 3, 6, 9], [3, 6, 9, 12]]), 4, 3, 0)
    for how in POOLINGS:
        options = {"key_pooling": how, "value_pooling": how, "backend": backend}
        key, value = pool_groups(chunks, draw(2, 2, 4, 4), scale=1.0, **options)
        assert bool(key.isfinite().all())
        assert value.shape == (2, 2, 4, 0)


def test_poolings_that_there_are_not_are_refused():
    x = draw(1, 2, 12, 4)
    chunks, summary = Chunks(x, x, 0, 4, 3, 0), draw(1, 2, 4, 4)
    with pytest.raises(ValueError, match="how must be one of 'weighted', 'mean', 'max', 'select', got 'average'"):
        pool(x.unflatten(2, (4, 3)), draw(1, 2, 4, 3), how="average")
    for given, key, value, said in (
        (summary, "average", "mean", "key_pooling, value_pooling must be one of .*'average'"),
        (summary, "mean", "average", "key_pooling, value_pooling must be one of .*'average'"),
        (None, "mean", "weighted", "must be 'mean' or 'max' where no summary query scores tokens, got 'weighted'"),
    ):
        with pytest.raises(ValueError, match=said):
            pool_groups(chunks, given, scale=1.0, key_pooling=key, value_pooling=value)
