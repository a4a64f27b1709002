"""Packed documents: spans, chunks and gradients, against each document alone."""

import itertools

import pytest
import torch
from oracles import oracle

import condense
from condense.ops import RuleSpans, SummaryColumns, document_spans
from condense.plan import ForwardPlan

CPU = torch.device("cpu")
METHODS = {
    "last": condense.CCA(group_size=4, window=6),
    "streaming": condense.LCA(group_size=3, window=4, rep_bias="matched"),
    "sinks": condense.StreamingLLM(sink=3, window=5),
    "dga": condense.DGA(group_size=4, gamma=0.3, window=2),
    "dense": condense.Dense(),
}
LENGTHS = [1, 9, 12, 29, 2]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_spans_are_those_of_each_document_behind_the_ones_before(method):
    rule = method.layout.rule
    spans = document_spans(rule, torch.tensor(LENGTHS), CPU)
    entries, window = spans.at(0, sum(LENGTHS), CPU)
    start = first_entry = 0
    for length in LENGTHS:
        alone = RuleSpans(rule, 0, 0).at(0, length, CPU)
        for got, want, shift in ((entries, alone[0], first_entry), (window, alone[1], start)):
            assert torch.equal(got.lo[..., start : start + length], want.lo + shift)
            assert torch.equal(got.hi[..., start : start + length], want.hi + shift)
        start, first_entry = start + length, first_entry + int(alone[0].hi[..., -1])
    for span in (entries, window):
        assert bool((span.lo.diff() >= 0).all())
        assert bool((span.hi.diff() >= 0).all())


def test_chunks_and_summaries_stay_inside_their_document():
    method = condense.CCA(group_size=4, window=6, summary="streaming", num_summary_queries=13)
    reading = ForwardPlan(31, documents=[1, 15, 0, 15]).reading(method, None, CPU)
    assert reading.num_chunks == 4
    assert reading.columns.tolist() == [[1, 5, 16, 20]]
    assert reading.numbers.tolist() == [[0, 1, 0, 1]]
    assert isinstance(reading.summaries, SummaryColumns)
    assert reading.summaries.lo.tolist() == [1, 2, 16, 17]
    assert reading.summaries.hi.tolist() == [11, 15, 26, 30]


def test_one_document_is_a_row_like_any_other():
    assert ForwardPlan(5, documents=[0, 5, 0]).documents is None
    assert ForwardPlan(5, documents=[2, 3]).documents.tolist() == [2, 3]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_outputs_and_gradients_are_those_of_the_documents_alone(method):
    inputs = [x.requires_grad_() for x in oracle.random_qkv(1, 4, 2, sum(LENGTHS), 4, 5, dtype=torch.float64)]
    marks = torch.tensor([0, *LENGTHS]).cumsum(0)
    packed = condense.attention(*inputs, method=method, cu_seqlens=marks)
    alone = torch.cat(
        [
            condense.attention(*(x[:, :, start:stop] for x in inputs), method=method)
            for start, stop in itertools.pairwise(marks.tolist())
        ],
        dim=2,
    )
    weight = torch.randn_like(packed)
    grads, want = (torch.autograd.grad((x * weight).sum(), inputs) for x in (packed, alone))
    # both are sums of a few dozen terms of order one in float64
    torch.testing.assert_close((packed, *grads), (alone, *want), rtol=0, atol=1e-13)


def test_a_method_with_an_attention_of_its_own_reads_documents_one_by_one():
    assert METHODS["last"].reads_packed
    assert not condense.Recall().reads_packed
    assert not condense.DGA(selection="prompt").reads_packed
