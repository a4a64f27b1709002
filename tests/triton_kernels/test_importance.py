"""The importance kernels against the definition: interpreted in float32 on a CPU, compiled on a GPU."""

import pytest
import torch
from oracles import oracle
from triton_kernels.test_attend import DEVICE, DTYPES, WIDTH

import condense
from condense.functional import extend
from condense.ops import importance
from condense.ops.tensors.sampling import sampled_queries
from condense.ops.triton.limits import WIDTHS

# B, H, K, L, D, pads
SHAPES = {
    "ratio1": (1, 2, 2, 70, (0,)),
    "ratio3": (1, 3, 1, 149, (0,)),
    "ratio7-padded": (3, 7, 1, 41, (0, 13, 41)),
    "long": (1, 2, 1, 4200 if DEVICE == "cuda" else 300, (0,)),
}
SAMPLES = {"few": (3, 4), "recent": (1, 0), "more-than-there-are": (200, 100), "default": (64, 64)}
MATRIX = [(DTYPES[0], WIDTH, shape, sample) for shape in SHAPES for sample in SAMPLES] + [
    (dtype, width, "ratio3", "default") for dtype in DTYPES for width in (WIDTHS if DEVICE == "cuda" else (24, 64))
]


def compute(q, k, pads, sample, backend):
    tokens = q.shape[2] - torch.tensor(pads)
    recent, random = sample
    sampled = sampled_queries(tokens, q.shape[2], recent, random, 1, q.device)
    return importance(q, k, sampled, scale=0.3, backend=backend)


@pytest.mark.parametrize(("dtype", "width", "shape", "sample"), MATRIX, ids=lambda x: str(x))
def test_importance(monkeypatch, dtype, width, shape, sample):
    if DEVICE == "cpu":
        monkeypatch.setattr("condense.ops.triton.importance._SPLIT", 48)
    (B, H, K, L, pads), sample = SHAPES[shape], SAMPLES[sample]
    q, k, _ = oracle.random_qkv(B, H, K, L, width, 1, dtype=dtype)
    want = compute(q.double(), k.double(), pads, sample, "reference")
    for b, n in enumerate(pads):
        q[b, :, :n] = torch.nan  # keys of padding are zero by contract, queries are anything
    got = compute(q.to(DEVICE), k.to(DEVICE), pads, sample, "triton")
    assert got.dtype == torch.float32
    # products of the inputs are exact or rounded to float32, summed in float32; a weight is off by as much, relatively,
    # as its score and its log-sum-exp are, absolutely, and a sum by no more than its terms
    size = 0.3 * float(q.nan_to_num().double().norm(dim=-1).amax() * k.double().norm(dim=-1).amax())
    error = torch.finfo(torch.float32).eps * ((width + 2) * size + L)
    torch.testing.assert_close(got.cpu().double(), want, rtol=2 * error, atol=0)


def test_repeats_are_bit_equal():
    q, k, _ = (x.to(DEVICE) for x in oracle.random_qkv(1, 4, 2, 90, WIDTH, 1, dtype=DTYPES[0]))
    first = compute(q, k, (0,), SAMPLES["few"], "triton")
    for _ in range(50 if DEVICE == "cuda" else 2):
        assert torch.equal(compute(q, k, (0,), SAMPLES["few"], "triton"), first)


def test_keys_of_any_layout():
    q, k, _ = (x.to(DEVICE) for x in oracle.random_qkv(2, 4, 2, 50, WIDTH, 1, dtype=DTYPES[0]))
    want = compute(q, k, (0, 7), SAMPLES["few"], "triton")
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    assert torch.equal(compute(q, k, (0, 7), SAMPLES["few"], "triton"), want)
    assert torch.equal(compute(q, k.mT.contiguous().mT, (0, 7), SAMPLES["few"], "triton"), want)


def test_a_prompts_choice_is_the_definitions():
    """One query head per KV head and keys far apart: no two scores within rounding of each other."""
    method = condense.DGA(group_size=4, gamma=0.2, min_focal=6, selection="prompt", num_recent=5, num_random=6)
    q, k, v = oracle.random_qkv(1, 2, 2, 61, WIDTH, WIDTH, dtype=DTYPES[0])
    want = extend(method, None, q.double(), k.double(), v.double(), scale=0.2, backend="reference")[1]
    got = extend(method, None, *(x.to(DEVICE) for x in (q, k, v)), scale=0.2, backend="triton")[1]
    num_focal = method.prompt_focal(61)
    assert torch.equal(got.entries[0][:, :, :num_focal].cpu(), want.entries[0][:, :, :num_focal].to(DTYPES[0]))
