"""The kernel of the largest weight that a token gets, held to float64 by twice the error of PyTorch in the dtype."""

import pytest
import torch
from lanes import DEVICE, DTYPES
from speed.budget import judge

from condense.ops import largest_weights
from condense.ops.types import soft_cap

# heads, KV heads, queries, keys, width, soft cap
CASES = [(4, 2, 21, 7, 64, 0.0), (3, 1, 17, 33, 96, 1.5), (2, 2, 1, 40, 80, 0.0)]
if DEVICE == "cuda":
    DTYPES = DTYPES[:2]
    CASES += [(32, 8, 1024, 1024, 128, 0.0), (16, 16, 1000, 1000, 192, 0.0), (8, 4, 300, 513, 256, 30.0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_largest_weights(case, dtype):
    H, K, L, N, D, cap = case
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, h, n, D, generator=generator, dtype=torch.float64).to(dtype) for h, n in ((H, L), (K, N)))
    lse = torch.randn(2, H, L, generator=generator) + 3
    lse[1, :, L // 2 :] = torch.inf
    if L == 1:
        lse[1] = 0

    def run(backend, **target):
        # as a prompt's keys lie: the heads of a token side by side
        keys = k.to(**target).transpose(1, 2).contiguous().transpose(1, 2)
        given = q.to(**target), keys, lse.to(target.get("device"))
        return largest_weights(*given, scale=D**-0.5, softcap=cap, backend=backend).cpu()

    x = soft_cap(q.to(DEVICE) @ k.to(DEVICE).repeat_interleave(H // K, 1).mT * D**-0.5, cap)
    plain = (x.float() - lse.to(DEVICE)[..., None]).amax(2).exp().unflatten(1, (K, -1)).amax(2)
    verdict = judge([run("triton", device=DEVICE)], [run("reference", dtype=torch.float64)], [plain.cpu()])
    assert verdict.passed, verdict
