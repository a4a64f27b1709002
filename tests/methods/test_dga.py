"""Rules of DGA alone: who is focal, and what a prompt's selection leaves behind."""

import pytest
import torch
from layers import extend
from oracles import oracle

import condense
from condense import DGA
from condense.ops import Chunks
from condense.ops.tensors.sampling import scramble


def test_focal_tokens_are_the_best_in_order_of_position_and_ties_go_to_the_earlier():
    method, summary = DGA(group_size=3, gamma=1), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    assert method.layout.rule.chunk == 6
    drawn, equal = [([0.0, 5, 1, 9, 2, 3], [1, 3, 5])], [([1.0, 2, 2, 2, 2, 1], [1, 2, 3]), ([7.0] * 6, [0, 1, 2])]
    for scores, focal in (*drawn, *equal, ([-1.0, -2, -3, 0, 0, 0], [3, 4, 5])):
        k, v = torch.tensor(scores, dtype=torch.float64)[None, None, :, None], torch.eye(6).double()[None, None]
        _, entries = method.represent(Chunks(k, v, 0, 1, 6, 0), summary, scale=1.0, backend="torch")
        rest = [i for i in range(6) if i not in focal]
        want = torch.eye(6).double()[[*focal, 0]]
        want[3] = 0
        want[3, rest] = k[0, 0, rest, 0].softmax(0)
        torch.testing.assert_close(entries[0, 0], want, rtol=1e-12, atol=0)
    # of equal importance in a prompt too
    method = DGA(group_size=4, gamma=0, min_focal=5, selection="prompt", num_recent=1, num_random=0)
    q, v = oracle.random_qkv(1, 2, 1, 37, 3, 1)[0], torch.eye(37, dtype=torch.float64)[None, None]
    _, past = extend(method, None, q, torch.ones(1, 1, 37, 3).double(), v, scale=1.0)
    assert past.entries[1][0, 0, :5].argmax(-1).tolist() == [0, 1, 2, 3, 4]


def test_gamma_means_what_is_written():
    # in floating point 0.55 * 100 is above 55 and 0.07 * 100 above 7
    assert DGA(group_size=100, gamma=0.55).layout.rule.chunk == 155
    assert DGA(group_size=100, gamma=0.07).layout.rule.chunk == 107
    assert DGA(group_size=16).layout.rule == condense.ops.UniformRule(chunk=18, window=1, entries=3)
    assert DGA(gamma=0).layout.rule.entries == 1
    assert DGA(gamma=1).layout.rule.chunk == 32
    lengths = torch.tensor([0, 1, 7, 100, 101, 1000])
    method = DGA(group_size=4, gamma=0.07, min_focal=2, selection="prompt")
    assert method.prompt_focal(lengths).tolist() == [0, 1, 3, 8, 9, 72]
    assert method.num_entries(lengths).tolist() == [0, 1, 4, 31, 32, 304]


def by_hand(place, seed):
    """splitmix64 on unsigned integers, of a start that depends on the seed."""
    x = (0x9E3779B97F4A7C15 * (place + 1 + seed * seed) + 0xBF58476D1CE4E5B9 * seed) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) >> 1


@pytest.mark.parametrize("seed", [0, 1, 7, 2**40 + 3, 2**70])
def test_scramble_is_unsigned_arithmetic(seed):
    places = torch.tensor([[0, 1, 2, 1000], [2**31, 2**40, 5, 2**62]])
    got = scramble(places, seed)
    assert got.dtype == torch.int64
    assert got.tolist() == [[by_hand(place, seed) for place in row] for row in places.tolist()]
