"""Proofs of the LCA paper, checked, for L tokens in groups of G, D and Dv wide."""

import pytest
import torch

import condense
from condense.ops import pool

L, G, W, D, Dv = 80, 16, 16, 8, 6
SCALE = D**-0.5
COUNTED = condense.LCA(group_size=G, window=W, rep_bias="log_size")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_proposition_1_the_weighted_mean_has_the_least_expected_error(seed):
    x, scores = random(1, 1, 1, G, D, seed=seed), random(1, 1, 1, G, seed=100 + seed)
    weights = scores.softmax(-1)[0, 0, 0]

    def error(point):
        return (weights * (x[0, 0, 0] - point).square().sum(-1)).sum()

    best = pool(x, scores, how="weighted")[0, 0, 0]
    for other in (best + 0.01 * random(D, seed=7), random(D, seed=8), *x[0, 0, 0]):
        # the error grows by exactly the squared distance, so the minimum is unique
        torch.testing.assert_close(error(other) - error(best), (other - best).square().sum(), rtol=1e-9, atol=1e-12)
    for how in ("mean", "max", "select"):
        assert error(pool(x, scores, how=how)[0, 0, 0]) > error(best)


def _similar_within_groups(spread, seed):
    """q, k, v ``[1, 1, L, width]`` whose tokens lie ``spread`` around a centre that their group shares."""
    centres = (random(1, 1, L // G, n, seed=seed + i).repeat_interleave(G, 2) for i, n in enumerate((D, Dv)))
    k, v = (x + spread * random(*x.shape, seed=seed + 5 + i) for i, x in enumerate(centres))
    return random(1, 1, L, D, seed=seed + 9), k, v


def _allowed(method, q, k, v):
    """What Theorem 1 allows for the distance between the last query's outputs, dense and condensed."""
    closed, deltas = (L - W) // G, []
    groups_k, groups_v = (x[0, 0, : closed * G].unflatten(0, (closed, G)) for x in (k, v))
    summary = q[0, 0, W : W + closed * G].unflatten(0, (closed, G)).mean(1)
    scores = SCALE * (summary[:, None] * groups_k).sum(-1)[None, None]
    for groups, how in ((groups_k, method.key_pooling), (groups_v, method.value_pooling)):
        deltas.append((groups - pool(groups[None, None], scores, how=how)[0, 0, :, None]).norm(dim=-1).max())
    V, Q = v.norm(dim=-1).max(), q[0, 0, -1].norm()
    return V * torch.expm1(2 * Q * deltas[0] * SCALE) + deltas[1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.0, 0.001, 0.01, 0.1])
@pytest.mark.parametrize("key_pooling", ["select", "weighted"])
def test_theorem_1_holds_if_representatives_count_as_their_tokens_and_fails_as_printed(key_pooling, spread, seed):
    method = COUNTED.replace(key_pooling=key_pooling)
    q, k, v = _similar_within_groups(spread, seed)
    methods = condense.Dense(), method, method.replace(rep_bias="none")
    dense, counted, once = (condense.attention(q, k, v, method=x)[0, 0, -1] for x in methods)
    error, bound = (dense - counted).norm(), _allowed(method, q, k, v)
    assert error <= bound + 1e-12
    assert (error > 0) if spread else (bound < 1e-12)
    if spread <= 0.001:
        # tight enough to say something: if representatives count once, a group weighs a sixteenth of its due
        assert (once - dense).norm() > max(bound, 0.1)
