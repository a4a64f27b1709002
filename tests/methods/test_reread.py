"""Reread's choice among scored tokens, and the weights that score them, against plain loops."""

import itertools

import pytest
import torch
from oracles import oracle_reread

from condense import Reread
from condense.ops import Problem, largest_weights
from condense.ops.triton.limits import weights_obstacle


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
    got, definition = (
        largest_weights(q, k, lse, scale=scale, softcap=softcap, backend=backend) for backend in ("torch", "reference")
    )
    for b, h, i in itertools.product(range(B), range(K), range(S)):
        weights = []
        for head, j in itertools.product((2 * h, 2 * h + 1), range(c)):
            score = scale * q[b, head, j] @ k[b, h, i]
            score = score if softcap == 0 else softcap * torch.tanh(score / softcap)
            weights.append(float((score - lse[b, head, j]).exp()))
        assert got[b, h, i] == pytest.approx(max(weights), rel=1e-12)
        assert definition[b, h, i] == pytest.approx(max(weights), rel=1e-12)


def test_largest_weights_of_heads_and_queries_that_do_not_fit_are_refused():
    q, k, lse = torch.zeros(1, 3, 5, 8), torch.zeros(1, 2, 7, 8), torch.zeros(1, 3, 5)
    with pytest.raises(ValueError, match="k must have heads that divide those of q, 3, got 2"):
        largest_weights(q, k, lse, scale=1.0)
    with pytest.raises(ValueError, match=r"lse must have one number for each query, \[1, 3, 5\], got \[1, 3, 4\]"):
        largest_weights(q, k[:, :1], lse[..., 1:], scale=1.0)


def test_numbers_by_arithmetic():
    method = Reread(share=0.55, sink=2, window=3, piece=4)
    assert [method.num_kept(n) for n in (0, 1, 5, 6, 100)] == [0, 1, 5, 5, 55]
    # pieces of 4, 4 and 2 tokens: sinks, the piece where it stands, and the piece so far
    assert method.num_pairs(10) == (4 * 4 + 10) + (4 * 6 + 10) + (2 * 4 + 3)
    assert method.replace(share=1).num_pairs(10) == 0


def test_kernels_weigh_tokens_in_16_bits_alone():
    problems = [Problem(torch.device("cuda"), dtype, (128,)) for dtype in (torch.bfloat16, torch.float32)]
    assert [weights_obstacle(problem) for problem in problems] == [
        None, "takes torch.bfloat16, torch.float16, got torch.float32"
    ]  # fmt: skip
