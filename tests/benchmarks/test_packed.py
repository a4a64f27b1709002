"""The study of packed documents times what `condense.attention` computes, in one call and in a call per document."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import packed

import condense
from condense.plan import ForwardPlan


def test_one_call_and_a_call_per_document_are_condensed_attention():
    method, lengths = condense.CCA(group_size=4, window=6), [17, 40, 7]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 64, packed.D, generator=generator) for heads in (4, 2, 2))
    want = condense.attention(q, k, v, method=method, cu_seqlens=torch.tensor([0, 17, 57, 64]))
    together = packed.layer(method, ForwardPlan(64, documents=lengths))(q, k, v)
    torch.testing.assert_close(together, want)
    torch.testing.assert_close(packed.separate(method, lengths)(q, k, v), want)
