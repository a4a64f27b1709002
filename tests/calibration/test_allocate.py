"""The order in which methods are handed out, against all allocations of small problems."""

import itertools
import random

import pytest

from condense.calibration.allocate import greedy_path


def test_an_example_by_hand():
    costs = {0: [0.0, 0.1, 0.4], 5: [0.0, 2.0, 2.1]}
    sizes = {0: [100, 50, 40], 5: [100, 50, 40]}
    # 0.1 for 50 bytes; then 0.3 for 10; then 2.1 for 60, which is cheaper a byte than 2.0 for 50
    assert greedy_path(costs, sizes) == [{0: 0, 5: 0}, {0: 1, 5: 0}, {0: 2, 5: 0}, {0: 2, 5: 2}]


def test_it_begins_with_what_loses_least_and_never_takes_what_loses_more_and_keeps_more():
    costs, sizes = {0: [0.2, 0.0, 0.0, 0.5]}, {0: [10, 80, 60, 20]}
    assert greedy_path(costs, sizes) == [{0: 2}, {0: 0}]


def test_equals_go_to_the_lowest_layer():
    costs, sizes = {i: [0.0, 1.0] for i in range(3)}, {i: [2, 1] for i in range(3)}
    assert [sum(step.values()) for step in greedy_path(costs, sizes)] == [0, 1, 2, 3]
    assert greedy_path(costs, sizes)[1] == {0: 1, 1: 0, 2: 0}


@pytest.mark.parametrize("seed", range(20))
def test_no_allocation_is_smaller_and_loses_less(seed):
    rng = random.Random(seed)
    costs = {i: [0.0, *(float(rng.randrange(1, 50)) for _ in range(3))] for i in range(4)}
    sizes = {i: [100, *(rng.randrange(1, 100) for _ in range(3))] for i in range(4)}

    def totals(allocation):
        return tuple(sum(of[i][n] for i, n in allocation.items()) for of in (costs, sizes))

    every = [totals(dict(enumerate(numbers))) for numbers in itertools.product(range(4), repeat=4)]
    path = [totals(step) for step in greedy_path(costs, sizes)]
    assert path[0] == (0.0, 400)
    assert path[-1][1] == min(size for _, size in every)
    for cost, size in path:
        assert not any((c < cost and s <= size) or (c <= cost and s < size) for c, s in every)
