"""Sparse prefill on compiled FlexAttention against its definition on the CPU."""

import pytest
import torch

from condense import FlexPrefill, MInference, VerticalSlash
from condense.baselines.blocks import SparseKeys, sparse_attention

LINES = VerticalSlash(vertical=50, slash=20)
FLEX = FlexPrefill(gamma=0.3, min_budget=128)
MIXED = MInference(patterns=("a_shape:sink=1,window=200", "block_sparse:blocks=2", *2 * ("vertical_slash:slash=150",)))
CASES = [(LINES, 1024, (64, 64)), (LINES, 1500, (64, 64)), (MIXED, 1500, (64, 64)), (FLEX, 1500, (64, 64))]
CASES.append((FLEX, 1024, (192, 128)))  # the widths of the keys and values that DeepSeek-V2's latents expand to


@pytest.mark.parametrize(("method", "length", "widths"), CASES, ids=lambda x: getattr(x, "name", x))
def test_compiled_flex_attention_gives_the_definition(method, length, widths):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, n, length, width, generator=generator, device="cuda")
        for n, width in ((4, widths[0]), (2, widths[0]), (2, widths[1]))
    )
    keys = method.choose(3 * q, k, scale=0.125)
    out, lse = sparse_attention(3 * q, k, v, keys, scale=0.125)
    exact = [x.cpu().double() for x in (3 * q, k, v)]
    want, want_lse = sparse_attention(*exact, SparseKeys(*(x.cpu() for x in keys)), scale=0.125)
    # float32 products on tensor cores (TF32) are off, so only sums are rounded
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-5, atol=2e-5)
