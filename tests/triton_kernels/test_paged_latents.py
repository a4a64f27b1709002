"""Decode over pages of latents: interpreted in float32 on a CPU, compiled for every dtype on a GPU."""

import pytest
import torch
from paged_pool import Pool
from paged_sequences import cut, random_latents, whole_latents
from record_pool import RECORDS, RecordPool
from speed.budget import errors, one_ulp

import condense

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
# H, and d_n, d_r, d_c, d_v; interpreted in the smallest that have blocks of 32 channels
SHAPES = [(16, (128, 64, 512, 128)), (40, (64, 32, 256, 64))] if CUDA else [(3, (16, 16, 32, 16))]
POOLS = {
    "streaming": (Pool, condense.LCA(group_size=4, window=8, rep_bias="log_size")),
    "last-odd-window": (Pool, condense.CCA(group_size=4, window=5)),
    "no-scores": (Pool, condense.LCA(group_size=4, window=8, key_pooling="mean", value_pooling="max")),
    "sinks": (Pool, condense.StreamingLLM(sink=5, window=9)),
    **{f"records-{name}": (RecordPool, RECORDS[name]) for name in ("default", "store-4", "drop", "entry-8-max")},
}


def steps_of(name, shape, dtype, backend):
    """Single tokens of three requests behind prompts of 45, 0 and 18 tokens ``[3, steps, H, d_v]``; and in float64."""
    (make, method), (H, widths), steps = POOLS[name], shape, 4 if DEVICE == "cpu" else 20
    pool = make(method, (1, widths[2] + widths[1], 0), dtype=dtype, device=DEVICE)
    scale, outs, rows = (widths[0] + widths[1]) ** -0.5, [], []
    for seed, length in enumerate((45, 0, 18)):
        qkv, pool.up = random_latents(H, widths, length + steps, seed=seed, dtype=dtype, device=DEVICE)
        request = pool.add(length + steps)
        if length:
            pool.read([(request, cut(qkv, 0, length))], scale=scale, backend="torch")
        rows.append((request, qkv))
    for _ in range(steps):
        chunks = [(r, cut(qkv, r.seen, r.seen + 1)) for r, qkv in rows]
        outs.append(torch.cat(pool.read(chunks, scale=scale, backend=backend)))
    up = type(pool.up)(*(w.double() for w in pool.up))
    exact = [whole_latents([x.double() for x in qkv], up, method, scale)[-steps:] for _, qkv in rows]
    return torch.stack(outs, dim=1), torch.stack(exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_steps_are_within_the_budget(name, shape, dtype):
    """At most twice as far from the definition as PyTorch is; in fewer bits, the output of PyTorch."""
    got, want = steps_of(name, shape, dtype, "triton")
    plain, _ = steps_of(name, shape, dtype, "torch")
    method = POOLS[name][1]
    if getattr(method, "store_bits", 16) == 16 and getattr(method, "entry_bits", 16) == 16:
        assert bool((errors(got, want) <= 2 * errors(plain, want) + one_ulp(want, dtype)).all())
        return
    # a choice with a near tie, or a code near the middle, may differ
    near = ((got - plain).abs() <= max(2e-5, 4 * torch.finfo(dtype).eps) * (1 + plain.abs())).all(-1)
    assert float(near.double().mean()) >= (0.98 if CUDA else 1)
