"""Numbers by row and random choices, which are the same however they are asked for."""

import pytest
import torch

from condense.ops import RuleSpans, SummarySpans, UniformRule
from condense.ops.tensors.sampling import scramble


@pytest.mark.parametrize(("other", "agree"), [(5, True), (6, False)])
def test_tensors_whose_rows_agree_are_recognised(other, agree):
    rows = torch.tensor([5, other])
    bounds = RuleSpans(UniformRule(4, 2), rows, rows)
    assert bounds.same_in_all_rows() == ((5, 5, 0, 0) if agree else None)
    assert bounds.is_hull(0, 1) is agree
    assert bounds.starts().tolist() == ([[5, 5, 0, 0]] if agree else [[5, 5, 0, 0], [6, 6, 0, 0]])
    assert SummarySpans(rows, 5, 5, 1, 1, 1).int_if_equal() == ((5, 5, 5) if agree else None)


WORD = 1 << 64


def by_hand(place, seed):
    """splitmix64 on unsigned integers, of a start that depends on the seed."""
    x = (place + 1) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15 * seed * seed + 0xBF58476D1CE4E5B9 * seed
    x %= WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return (x ^ (x >> 31)) >> 1


@pytest.mark.parametrize("seed", [0, 1, 7, 2**40 + 3, 2**70])
def test_scramble_is_unsigned_arithmetic(seed):
    places = torch.tensor([[0, 1, 2, 1000], [2**31, 2**40, 5, 2**62]])
    got = scramble(places, seed)
    assert got.dtype == torch.int64
    assert got.tolist() == [[by_hand(place, seed) for place in row] for row in places.tolist()]
