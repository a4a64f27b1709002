"""`condense.ops.pool` and `group_scores`: both backends equal the formulas; ties, gradients, rounding."""

import pytest
import torch

from condense.ops import POOLINGS, group_scores, pool

BACKENDS = ["reference", "torch"]
EXACT = {"rtol": 1e-13, "atol": 1e-13}


def groups(dtype=torch.float64, shape=(2, 3, 4, 5, 6)):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    scores = torch.randn(shape[:4], generator=generator, dtype=torch.float64)
    return x, scores.to(torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_group_scores(backend):
    k, _ = groups()
    summary = k[:, :, :, 1] * 2
    want = torch.stack([(summary * k[:, :, :, i]).sum(-1) * 0.3 for i in range(5)], dim=-1)
    torch.testing.assert_close(group_scores(summary, k, scale=0.3, backend=backend), want, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", POOLINGS)
def test_pool(backend, how):
    x, scores = groups()
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    best = torch.zeros_like(scores).scatter(-1, scores.max(-1, keepdim=True).indices, 1.0)
    want = {
        "weighted": (weights[..., None] * x).sum(3),
        "mean": x.sum(3) / 5,
        "max": x.max(3).values,
        "select": (best[..., None] * x).sum(3),
    }[how]
    torch.testing.assert_close(pool(x, scores, how=how, backend=backend), want, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", POOLINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_pool_rounds_once(backend, how, dtype):
    """Weights and sums are float32 and the result is rounded once."""
    x, scores = groups(dtype)
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
    """Equal keys have equal scores, bit by bit, wherever they stand in the group."""
    generator = torch.Generator().manual_seed(size)
    one = torch.randn(2, 3, 4, 1, 17, generator=generator, dtype=torch.float64).to(dtype)
    summary = torch.randn(2, 3, 4, 17, generator=generator, dtype=torch.float64)
    summary = summary.to(torch.promote_types(dtype, torch.float32))
    k = one.repeat(1, 1, 1, size, 1)
    scores = group_scores(summary, k, scale=0.25, backend=backend)
    assert bool((scores == scores[..., :1]).all())
    v = torch.arange(size).to(dtype)[:, None].expand(2, 3, 4, size, 1)
    assert bool((pool(v, scores, how="select", backend=backend) == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", POOLINGS)
def test_pool_gradcheck(backend, how):
    x, scores = groups(shape=(1, 1, 2, 3, 2))
    inputs = (x.requires_grad_(), scores.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: pool(a, b, how=how, backend=backend), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", POOLINGS)
def test_pool_no_groups(backend, how):
    x, scores = groups(shape=(2, 3, 0, 5, 6))
    assert pool(x, scores, how=how, backend=backend).shape == (2, 3, 0, 6)
    assert group_scores(x[:, :, :, 0], x, scale=1.0, backend=backend).shape == (2, 3, 0, 5)
