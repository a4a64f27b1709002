"""What the decode step got wrong once: which rows are real, in memory that is not contiguous."""

import pytest
import torch
from triton_kernels.test_step import DEVICE, empty_state, plan_of

from condense import CCA
from condense.ops.triton import step as triton_step
from condense.ops.types import NewToken

METHOD = CCA(group_size=2, window=3, summary="streaming")


@pytest.mark.parametrize("layout", ["column", "expanded"])
def test_real_rows_have_any_stride(layout):
    """Defect 7: rows are read one after the other, whatever the stride of ``real``."""
    B, H, K, L, D = 3, 1, 1, 8, 16
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, n, L, D, generator=generator).to(DEVICE) for n in (H, K, K))
    mask = torch.rand(B, L, generator=generator).to(DEVICE) < 0.6
    if layout == "expanded":
        mask = mask[:1].expand(B, L)
    strided, copied = (empty_state(METHOD, B, K, D, D, L, dtype=torch.float32) for _ in range(2))
    for i in range(L):
        now = [x[:, :, i : i + 1] for x in (q, k, v)]
        outs = [
            triton_step.step(NewToken(*now, real), state, plan_of(METHOD), scale=0.25)
            for state, real in ((strided, mask[:, i]), (copied, mask[:, i].clone().contiguous()))
        ]
        assert mask[:, i].stride() != (1,)
        assert torch.equal(*outs)
    for a, b in zip(strided, copied, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
