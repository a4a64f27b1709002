"""Reread's choice among scored tokens, and the weights that score them, against plain loops."""

import itertools

import pytest
import torch
from oracles import oracle_reread

from condense import Reread
from condense.methods.reread import largest_weights
from condense.ops.evicted import mean_evicted, with_evicted


@pytest.mark.parametrize("settings", [{}, {"share": 0.5, "window": 0}, {"sink": 0, "window": 0}, {"share": 1}])
def test_the_choice_is_that_of_the_definition(settings):
    method = Reread(**({"share": 0.25, "sink": 2, "window": 3} | settings))
    generator = torch.Generator().manual_seed(0)
    tokens, L = torch.tensor([20, 13, 4, 0]), 20
    # few values, so that many scores are equal; layers with different numbers of heads
    scores = [torch.randint(4, (4, K, L), generator=generator) / 8 for K in (2, 1, 4)]
    kept, counts = method.chosen(scores, tokens)
    for row, n in enumerate(tokens.tolist()):
        assert not any(x[row, :, n:].any() for x in kept)
        assert int(counts[:, row].sum()) == len(scores) * method.num_kept(n)
        if n == 0:
            continue
        expected = oracle_reread.kept(method, [x[row, :, :n] for x in scores])
        assert [[h.nonzero()[:, 0].tolist() for h in layer[row]] for layer in kept] == expected
        for layer, count in zip(kept, counts[:, row], strict=True):
            assert layer[row].sum(1).tolist() == [count] * layer.shape[1]


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_largest_weights(softcap):
    generator = torch.Generator().manual_seed(0)
    B, H, K, c, S, D, scale = 2, 4, 2, 300, 7, 8, 0.3
    q, k = (torch.randn(B, n, m, D, generator=generator, dtype=torch.float64) for n, m in ((H, c), (K, S)))
    lse = torch.randn(B, H, c, generator=generator, dtype=torch.float64) + 5
    lse[1, :, 100:] = torch.inf
    got = largest_weights(q, k, lse, scale=scale, softcap=softcap)
    for b, h, i in itertools.product(range(B), range(K), range(S)):
        weights = []
        for head, j in itertools.product((2 * h, 2 * h + 1), range(c)):
            score = scale * q[b, head, j] @ k[b, h, i]
            score = score if softcap == 0 else softcap * torch.tanh(score / softcap)
            weights.append(float((score - lse[b, head, j]).exp()))
        assert got[b, h, i] == pytest.approx(max(weights), rel=1e-12)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("Dv", [6, 0])
def test_evicted_tokens_are_as_many_of_their_mean(Dv, softcap):
    """One softmax over what stays and n copies of the mean; a row that keeps all, a head of a row that sees nothing."""
    generator = torch.Generator().manual_seed(0)
    B, H, K, L, M, D = 3, 4, 2, 5, 9, 8
    q, k, v = (torch.randn(B, *n, generator=generator).double() for n in ((H, L, D), (K, M, D), (K, M, Dv)))
    tokens, kept = torch.tensor([9, 7, 4]), torch.rand(B, K, M, generator=generator) < 0.5
    kept[:2, :, 3] = True
    kept[2, :, :4] = True
    kept[1, :, 7:] = kept[2, :, 4:] = False
    evicted = mean_evicted(k, v, kept, tokens)
    values = v if Dv else k[..., :6]
    options = {"scale": 0.7, "softcap": softcap}

    def attended(row, head, copies):
        stays, gone = kept[row, head // 2], ~kept[row, head // 2]
        gone = gone[: tokens[row]]
        keys, of_keys = k[row, head // 2], values[row, head // 2]
        mean_k, mean_v = (x[: len(gone)][gone].mean(0, keepdim=True) for x in (keys, of_keys))
        n = copies * int(gone.sum())
        scores = 0.7 * q[row, head] @ torch.cat([keys[stays], mean_k.expand(n, -1)]).mT
        scores = scores if softcap == 0 else softcap * torch.tanh(scores / softcap)
        out = scores.softmax(-1) @ torch.cat([of_keys[stays], mean_v.expand(n, -1)])
        return out, scores.logsumexp(-1)

    def all_of(copies):
        rows = [[attended(b, h, copies) for h in range(H)] for b in range(B)]
        return tuple(torch.stack([torch.stack([head[i] for head in row]) for row in rows]) for i in (0, 1))

    (out, lse), want = all_of(0), all_of(1)
    lse[0, 0, 2], out[0, 0, 2] = -torch.inf, 0
    got = with_evicted(q, (out, lse), evicted, **options)
    want[0][0, 0, 2], want[1][0, 0, 2] = 0, -torch.inf
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(got[0][2], out[2])
    assert evicted[2].abs().sum() == 0


def test_numbers_by_arithmetic():
    method = Reread(share=0.55, sink=2, window=3, piece=4)
    assert [method.num_kept(n) for n in (0, 1, 5, 6, 100)] == [0, 1, 5, 5, 55]
    # pieces of 4, 4 and 2 tokens: sinks, the piece where it stands, and the piece so far
    assert method.num_pairs(10) == (4 * 4 + 10) + (4 * 6 + 10) + (2 * 4 + 3)
    assert method.replace(share=1).num_pairs(10) == 0
