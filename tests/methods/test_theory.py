"""Proofs of the LCA paper, checked: Proposition 1; Theorem 1 where it holds, and where it does not.

Shapes: L tokens in groups of G, D and Dv widths.
"""

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
    k, v = (random(1, 1, L // G, 1, n, seed=seed + i).expand(-1, -1, -1, G, -1) for i, n in enumerate((D, Dv)))
    k, v = (x.flatten(2, 3) + spread * random(1, 1, L, x.shape[-1], seed=seed + 5 + i) for i, x in enumerate((k, v)))
    return random(1, 1, L, D, seed=seed + 9), k, v


def _last_query(method, q, k, v):
    """Output of the last query, dense and condensed, and what Theorem 1 allows for their distance."""
    dense = condense.attention(q, k, v, method=condense.Dense())[0, 0, -1]
    condensed = condense.attention(q, k, v, method=method)[0, 0, -1]
    closed = (L - W) // G
    deltas = []
    for x, how in ((k, method.key_pooling), (v, method.value_pooling)):
        groups = x[:, :, : closed * G].unflatten(2, (closed, G))
        summary = torch.stack([q[0, 0, j * G + W : (j + 1) * G + W].mean(0) for j in range(closed)])
        scores = SCALE * (summary[:, None] * k[0, 0, : closed * G].unflatten(0, (closed, G))).sum(-1)
        deltas.append((groups - pool(groups, scores[None, None], how=how)[..., None, :]).norm(dim=-1).max())
    V, Q = v.norm(dim=-1).max(), q[0, 0, -1].norm()
    return dense, condensed, V * torch.expm1(2 * Q * deltas[0] * SCALE) + deltas[1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.0, 0.001, 0.01, 0.1])
@pytest.mark.parametrize("key_pooling", ["select", "weighted"])
def test_theorem_1_holds_if_representatives_count_as_their_tokens_and_fails_as_printed(key_pooling, spread, seed):
    method = COUNTED.replace(key_pooling=key_pooling)
    q, k, v = _similar_within_groups(spread, seed)
    dense, condensed, bound = _last_query(method, q, k, v)
    error = (dense - condensed).norm()
    assert error <= bound + 1e-12
    # of identical tokens within groups nothing deviates
    assert (error > 0) if spread else (bound < 1e-12)
    if spread <= 0.001:
        # tight enough to say something: if representatives count once, a group weighs a sixteenth of its due
        once = condense.attention(q, k, v, method=method.replace(rep_bias="none"))[0, 0, -1]
        assert (once - dense).norm() > max(bound, 0.1)
