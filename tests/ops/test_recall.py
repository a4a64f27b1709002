"""Recall against plain loops: index, choice and attention, query by query."""

import pytest
import torch
from grids import grid
from layers import Counting
from oracles import oracle, oracle_recall

from condense import Recall, attention
from condense.ops import RuleSpans, Source, UniformRule, attend_recall, recall
from condense.ops.latents import Ranks
from condense.ops.recall import IndexChoice, Quota, RecallSources, StoreFormat, choose_groups, index_scores, split_keys
from condense.ops.torch import attend as torch_attend

EXACT = {"rtol": 1e-11, "atol": 1e-11}
SCALE = 0.6
BACKENDS = ("reference", "torch")
HEADS = {"ratio-1": (2, 2), "ratio-3": (6, 2), "ratio-7": (7, 1)}


def tensors(H, K, L, *, dtype=torch.float64, rows=2):
    return oracle.random_qkv(rows, H, K, L, 6, 5, dtype=dtype)


SIZES = [(4, 5), (1, 0), (1, 3), (3, 0), (4, 9), (6, 2)]


@grid(18, heads=HEADS, sizes=SIZES, r=[2, 3], unchosen=["mean", "drop"], backend=BACKENDS)
def test_against_plain_loops(heads, sizes, r, unchosen, backend, monkeypatch):
    """In blocks of seven queries, the last of one query alone."""
    monkeypatch.setattr(torch_attend, "_RECALL_BLOCK", 7)
    qkv, method = tensors(*heads, 29), Recall(group_size=sizes[0], window=sizes[1], num_recall=r, unchosen=unchosen)
    got = attention(*qkv, method=method, scale=SCALE, backend=backend, return_lse=True)
    torch.testing.assert_close(got, oracle.attention(*qkv, method=method, scale=SCALE), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [5, 12, 64, 96])
def test_an_index_holds_signs_and_steps(width, dtype):
    """Bit by bit against plain loops; signs of numbers too near to zero to be sure of are left out."""
    k = torch.randn(1, 2, 3, 4, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64).to(dtype)
    index, W, size = split_keys(k)[0], -(-width // 8), oracle_recall.block(width)
    assert index.signs.shape == (1, 2, 3, 8 * W)
    assert (index.signs.dtype, index.steps.dtype, index.steps.shape[3]) == (torch.uint8, dtype, 5)
    turned = k.double() @ oracle_recall.rotation(width)
    # sums of as many numbers as a key has, then rounded to the dtype of the keys
    error = 2 * width * torch.finfo(torch.promote_types(dtype, torch.float32)).eps + torch.finfo(dtype).eps
    steps, of_centre = index.steps.double().split([4, 1], dim=3)
    largest = turned.mean(3).abs().amax(3, keepdim=True)
    digits, power = torch.frexp(largest / (15 * size))
    torch.testing.assert_close(of_centre, torch.ldexp((16 * digits).ceil() / 16, power), rtol=0.0, atol=0.0)
    tokens, codes = index.signs.int().split([4 * W, 4 * W], dim=3)
    numbers = index.centres(width, torch.float64)
    for column in range(width):
        code = codes[..., column % (4 * W)] >> (column // (4 * W) * 4) & 15
        assert torch.equal(2.0 * code - 15, numbers[..., column])
    middle = of_centre * size * numbers
    assert bool(((middle - turned.mean(3)).abs() <= of_centre * size * (1 + 16 * error)).all())
    turned = turned - middle[:, :, :, None]
    want = turned.square().sum(-1) / turned.abs().sum(-1) / size
    torch.testing.assert_close(steps, want, rtol=error, atol=0.0)
    bytes, sure = tokens.unflatten(3, (4, W)), turned.abs() > 1e-5
    bits = torch.stack([bytes[..., column % W] >> (column // W) & 1 for column in range(width)], -1)
    assert torch.equal(bits[sure] == 1, turned[sure] > 0)
    signs = index.turned(width, torch.float64)
    assert torch.equal(signs[sure], turned.sign()[sure])
    # the product with itself of what a key differs by is kept
    torch.testing.assert_close((signs * turned).sum(-1) * want, turned.square().sum(-1) / size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("g", "width"), [(16, 64), (3, 24), (16, 128)], ids=str)
def test_a_group_is_kept_alike_alone_and_among_others(g, width, dtype):
    """To the bit, so that a cache does not depend on how a text was cut: index, and what a store of 4 bits holds."""
    k = torch.randn(2, 3, 70, g, width, generator=torch.Generator().manual_seed(g)).to(dtype)
    form, whole = StoreFormat(4, g), split_keys(k)
    rows = form.pack(k, k, whole[1])
    for start, stop in ((0, 1), (1, 2), (2, 9), (9, 70)):
        part = k[:, :, start:stop]
        index, rest = split_keys(part)
        assert all(map(torch.equal, index, whole[0].narrow(start, stop)))
        assert torch.equal(form.pack(part, part, rest), rows[:, :, start * g : stop * g])
    alone, _ = split_keys(k[1:, 2:, 5:6])
    assert all(map(torch.equal, alone, (x[1:, 2:, 5:6] for x in whole[0])))


def test_the_choice_carries_no_gradient_and_takes_keys_and_queries_of_zeros():
    q, k, v = tensors(2, 1, 11)
    index = split_keys(k[:, :, :10].requires_grad_().unflatten(2, (5, 2)))[0]
    assert not any(x.requires_grad for x in index)
    assert not index_scores(q.requires_grad_(), index, SCALE).requires_grad
    index, q = split_keys(torch.zeros(1, 1, 2, 4, 16))[0], torch.tensor([0.0, 1.0])[:, None].expand(1, 1, 2, 16)
    assert bool((index.steps == 0).all())
    assert bool((index_scores(q, index, SCALE) == 0).all())


def test_ties_go_to_the_lower_group():
    scores = torch.tensor([[[[1.0, 2.0, 1.0, 2.0, 1.0, 2.0]]]])
    for r, want in ((1, [1]), (2, [1, 3]), (4, [0, 1, 3, 5]), (5, [0, 1, 2, 3, 5])):
        chosen = choose_groups(scores, torch.tensor([[[6]]]), Quota(r), 1)
        assert chosen[0, 0, 0].nonzero().flatten().tolist() == want
    chosen = choose_groups(scores, torch.tensor([[[3]]]), Quota(5), 1)
    assert chosen[0, 0, 0].tolist() == [True] * 3 + [False] * 3
    assert recall.choice.chosen_groups(chosen, 5).tolist() == [[[[0, 1, 2, 6, 6]]]]


def test_a_share_of_the_groups_is_rounded_up():
    assert [Quota(part=3, of=10).at(n) for n in (0, 1, 3, 4, 6, 7, 10, 11)] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert Recall(num_recall=0.55, min_recall=0).quota.at(100) == 55  # 56 in floating point
    groups = torch.tensor([1, 300, 2**20])  # times a numerator of 16 digits they would not fit into int64
    assert Recall(num_recall=1 / 3, min_recall=0).quota.at(groups).tolist() == [1, 100, 349526]
    assert Recall(num_recall=1e-20, min_recall=0).quota.at(groups).tolist() == [1, 1, 1]
    assert Recall(num_recall=1 / 3, min_recall=101).quota.at(groups).tolist() == [1, 101, 349526]
    assert [Quota(least=3, part=3, of=10).at(n) for n in (0, 1, 3, 4, 10, 11)] == [0, 1, 3, 3, 3, 4]
    assert Recall(num_recall=2).quota.at(groups).tolist() == [1, 2, 2]
    scores = torch.randn(1, 2, 5, 9, generator=torch.Generator().manual_seed(0))
    closed = torch.tensor([[[0, 1, 4, 7, 9]]])
    chosen = choose_groups(scores, closed, Quota(part=3, of=10), 1)
    for t, n in enumerate((0, 1, 2, 3, 3)):
        want = choose_groups(scores[:, :, t : t + 1], closed[..., t : t + 1], Quota(n), 1)
        assert torch.equal(chosen[:, :, t : t + 1], want)


def test_memory_is_linear(monkeypatch):
    largest = []
    monkeypatch.setattr(torch_attend, "_RECALL_BLOCK", 16)
    for L in (512, 1024):
        qkv = tensors(1, 1, L, rows=1, dtype=torch.float32)
        with Counting() as counting:
            attention(*qkv, method=Recall(group_size=8, window=16, num_recall=4))
        largest.append(counting.largest)
    assert largest[1] <= 2.2 * largest[0]


def test_bad_input():
    q, k, v = tensors(2, 1, 8)
    choice = IndexChoice(q, split_keys(k.unflatten(2, (2, 4)))[0], 1.0, Quota(1), ranks=Ranks(4, abs, abs))
    for stored, options, message in (
        (8, {"backend": "cuda"}, "backend must"),
        (8, {"backend": "triton"}, r"'triton' .*; chooses for the heads of one process.*; use backend='torch'"),
        (7, {}, "store must hold"),
    ):
        store = Source(k[:, :, :stored], v[:, :, :stored])
        sources = RecallSources(store, Source(k, v), RuleSpans(UniformRule(4, 1), 0, 0))
        with pytest.raises(ValueError, match=message):
            attend_recall(q, sources, choice, scale=1.0, **options)


def test_with_all_groups_open_the_mean_changes_no_bit():
    qkv, method = tensors(6, 2, 23), Recall(group_size=4, window=5, num_recall=5)
    for backend in BACKENDS:
        methods = method.replace(unchosen="mean"), method.replace(unchosen="drop")
        assert torch.equal(*(attention(*qkv, method=x, backend=backend) for x in methods))
