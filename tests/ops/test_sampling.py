"""Random choices: the same wherever they are made, different from place to place and from seed to seed."""

import pytest
import torch

from condense.ops.tensors.sampling import sampled_queries, scramble

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


def test_scramble_spreads():
    lots = scramble(torch.arange(4096), 3)
    assert len(lots.unique()) == 4096
    assert int(lots.min()) >= 0
    # 64 bins of 64 on average: a standard deviation of 8
    counts = (lots >> 57).bincount(minlength=64)
    assert bool(((counts - 64).abs() < 5 * 8).all())
    assert abs(float((lots.double() * scramble(torch.arange(4096), 4).double()).mean()) / 2**124 - 1) < 0.1


def test_sampled_queries_are_alike_in_padded_rows():
    L, lengths = 50, (50, 33, 4, 0)
    sample = sampled_queries(torch.tensor(lengths), L, 6, 10, 1, torch.device("cpu"))
    for b, n in enumerate(lengths):
        columns = sample.columns[b]
        chosen = (columns[columns >= 0] - (L - n)).tolist()
        alone = sampled_queries(torch.tensor([n]), n, 6, 10, 1, torch.device("cpu"))
        assert chosen == alone.columns[alone.columns >= 0].tolist()
        assert sample.num_later[b].tolist() == [sum(c >= i for c in columns.tolist()) for i in range(L)]
        assert len(set(chosen)) == len(chosen) == min(n, 16)
        assert chosen[-6:] == list(range(max(0, n - 6), n))
