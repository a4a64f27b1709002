"""Numbers by row and random choices: the same however they are asked for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from condense.ops import RuleSpans, SummarySpans, UniformRule
from condense.ops.tensors.per_row import (
    as_rows,
    at_least,
    at_most,
    broadcast_rows,
    int_if_equal,
    map_rows,
    max_row,
    min_row,
)
from condense.ops.tensors.sampling import scramble

NUMBERS = st.lists(st.integers(-9, 9), min_size=1, max_size=3)


@given(numbers=NUMBERS, bound=st.integers(-9, 9))
def test_every_operation_is_that_of_each_row(numbers, bound):
    x, B = int_if_equal(torch.tensor(numbers)), len(numbers)
    assert isinstance(x, int) == (len(set(numbers)) == 1)
    assert as_rows(x, B).tolist() == numbers
    assert as_rows(at_least(x, bound), B).tolist() == [max(n, bound) for n in numbers]
    assert as_rows(at_most(x, bound), B).tolist() == [min(n, bound) for n in numbers]
    assert as_rows(map_rows(lambda n: n * n, x), B).tolist() == [n * n for n in numbers]
    assert (min_row(x), max_row(x)) == (min(numbers), max(numbers))
    assert (torch.zeros(B, 2, 3, dtype=torch.int64) + broadcast_rows(x, 3))[:, 1, 2].tolist() == numbers


@given(seen=st.integers(0, 99), window=st.one_of(st.none(), st.integers(0, 9)), most=st.one_of(st.none(), st.just(3)))
def test_a_rule_says_the_same_of_ints_and_tensors(seen, window, most):
    rule = UniformRule(chunk=4, window=window, entries=2, max_chunks=most)
    for ask in (rule.closed, rule.visible_entries, lambda n: rule.pooled(n, 3)):
        assert ask(torch.tensor([seen])).tolist() == [ask(seen)]


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
