"""Recall that leaves groups out keeps no entries: its prompts and steps in Triton against the definition."""

import pytest
import torch

import condense
from condense import Recall

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHOD = Recall(group_size=4, window=5, num_recall=3, index_bits=8, unchosen="drop")


def qkv(L, H=4, K=2, D=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, L, D, generator=generator).to(DEVICE) for n in (H, K, K)]


@pytest.mark.parametrize("method", [METHOD, METHOD.replace(num_recall=0)], ids=["some", "none"])
def test_a_prompt(method):
    tensors = qkv(45)
    got = condense.attention(*tensors, method=method, backend="triton")
    want = condense.attention(*(x.double() for x in tensors), method=method, backend="reference")
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
