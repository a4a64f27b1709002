"""The order in which methods are handed out, and what loses least in a size, against all allocations."""

import itertools
import random

import pytest

from condense.calibration.curve import best_within, greedy_path, most_bytes

EVERY = [dict(enumerate(numbers)) for numbers in itertools.product(range(4), repeat=4)]


def test_it_begins_with_what_loses_least_and_never_takes_what_loses_more_and_keeps_more():
    costs, sizes = {0: [0.2, 0.0, 0.0, 0.5]}, {0: [10, 80, 60, 20]}
    assert greedy_path(costs, sizes) == [{0: 2}, {0: 0}]
    # equals go to the lowest layer
    costs, sizes = {i: [0.0, 1.0] for i in range(3)}, {i: [2, 1] for i in range(3)}
    assert [sum(step.values()) for step in greedy_path(costs, sizes)] == [0, 1, 2, 3]
    assert greedy_path(costs, sizes)[1] == {0: 1, 1: 0, 2: 0}


def total(of, allocation):
    return sum(of[i][n] for i, n in allocation.items())


@pytest.mark.parametrize("seed", range(20))
def test_no_allocation_of_the_path_is_larger_than_one_that_loses_less(seed):
    rng = random.Random(seed)
    costs = {i: [0.0, *(float(rng.randrange(1, 50)) for _ in range(3))] for i in range(4)}
    sizes = {i: [100, *(rng.randrange(1, 100) for _ in range(3))] for i in range(4)}
    both = EVERY, greedy_path(costs, sizes)
    every, path = ([(total(costs, x), total(sizes, x)) for x in allocations] for allocations in both)
    assert path[0] == (0.0, 400)
    assert path[-1][1] == min(size for _, size in every)
    for cost, size in path:
        assert not any((c < cost and s <= size) or (c <= cost and s < size) for c, s in every)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_fits_loses_less(seed):
    rng = random.Random(seed)
    costs = {i: [float(rng.randrange(100)) for _ in range(4)] for i in range(4)}
    sizes = {i: [rng.randrange(1, 100) for _ in range(4)] for i in range(4)}
    room = rng.randrange(sum(map(min, sizes.values())), 400)
    best = best_within(costs, sizes, room)
    assert total(sizes, best) <= room
    assert total(costs, best) == min(total(costs, each) for each in EVERY if total(sizes, each) <= room)


def test_problems_by_hand():
    costs, sizes = {0: [0.0, 0.1], 1: [0.0, 0.2]}, {0: [10**9, 7], 1: [10**9, 11]}
    assert best_within(costs, sizes, 18) == {0: 1, 1: 1}
    assert best_within({0: [0.0, 0.0, 1.0]}, {0: [30, 20, 10]}, 100) == {0: 1}
    # sizes are rounded up to small steps
    costs = {i: [0.0, 1.0] for i in range(3)}
    sizes = {i: [2**30 + 1, 1] for i in range(3)}
    # in steps of 2 ** 17 bytes: two large ones need two steps more than their bytes
    assert best_within(costs, sizes, 2**31 + 2) == {0: 0, 1: 1, 2: 1}
    assert sum(best_within(costs, sizes, 2**31 + 2**19).values()) == 1


def test_a_share_has_room_for_what_it_is_the_share_of():
    """Also where the product of share and bytes is rounded to less than that, as 0.29 * 100 is."""
    lost = 0
    for tokens in (100, 192, 8192):
        for kept in range(1, tokens + 1):
            room = most_bytes(kept / tokens, 64 * tokens)
            assert room == 64 * kept
            assert best_within({0: [0.0]}, {0: [64 * kept]}, room) == {0: 0}
            lost += int(kept / tokens * 64 * tokens) < room
    assert lost > 0
