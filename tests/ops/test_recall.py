"""Recall against plain loops: index, choice and attention, query by query."""

import pytest
import torch
from grids import grid
from layers import Counting
from oracles import oracle

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
    return oracle.random_qkv(rows, H, K, L, 8, 5, dtype=dtype)


SIZES = [(4, 5), (1, 0), (1, 3), (3, 0), (4, 9), (6, 2)]


@grid(18, heads=HEADS, sizes=SIZES, r=[2, 3], unchosen=["mean", "drop"], backend=BACKENDS)
def test_against_plain_loops(heads, sizes, r, unchosen, backend, monkeypatch):
    """In blocks of seven queries, the last of one query alone."""
    monkeypatch.setattr(torch_attend, "_RECALL_BLOCK", 7)
    qkv, method = tensors(*heads, 29), Recall(group_size=sizes[0], window=sizes[1], num_recall=r, unchosen=unchosen)
    got = attention(*qkv, method=method, scale=SCALE, backend=backend, return_lse=True)
    torch.testing.assert_close(got, oracle.attention(*qkv, method=method, scale=SCALE), **EXACT)


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
