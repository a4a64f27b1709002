"""Sparse prefill on compiled FlexAttention against its definition on the CPU."""

import pytest
import torch

from condense.methods import FlexPrefill, VerticalSlash
from condense.ops import SparseKeys, sparse_attention


@pytest.mark.parametrize("length", [1024, 1500])
@pytest.mark.parametrize(
    "method", [VerticalSlash(vertical=50, slash=20), FlexPrefill(gamma=0.3, min_budget=128)], ids=lambda m: m.name
)
def test_compiled_flex_attention_gives_the_definition(method, length):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, n, length, 64, generator=generator, device="cuda") for n in (4, 2, 2))
    keys = method.choose(3 * q, k, scale=0.125)
    out, lse = sparse_attention(3 * q, k, v, keys, scale=0.125)
    exact = [x.cpu().double() for x in (3 * q, k, v)]
    want, want_lse = sparse_attention(*exact, SparseKeys(*(x.cpu() for x in keys)), scale=0.125)
    # float32 products on tensor cores (TF32) are off, so only sums are rounded
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-5, atol=2e-5)
