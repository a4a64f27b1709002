"""A captured step over pages: replays with other tokens, lengths and places are what PyTorch computes."""

import itertools

import pytest
import torch
from oracles import oracle
from paged_pool import NULL, Pool
from record_pool import RecordPool

import condense
from condense.ops.paged import NewTokens, read_paged

H, K, D = 8, 2, 128
_RECALL = condense.Recall(window=64, num_recall=8, min_recall=4, store_bits=8)
_LCA = condense.LCA(window=64, key_pooling="weighted", rep_bias="log_size")
RECORDS = [_RECALL, _RECALL.replace(num_recall=0.2, store_bits=4), _RECALL.replace(window=0, unchosen="drop")]
RECORDS += [_LCA.replace(entry_bits=4), _LCA.replace(entry_bits=8, rep_bias="matched")]


@pytest.mark.parametrize("num_empty", [2, 30])
@pytest.mark.parametrize("method", [_LCA, condense.CCA(window=20)], ids=str)
def test_replays_of_pooled_groups(method, num_empty):
    """With few requests kernels start early, with many they do not."""
    replayed(*(Pool(method, (K, D, D), dtype=torch.bfloat16, device="cuda") for _ in range(2)), num_empty=num_empty)


@pytest.mark.parametrize("method", RECORDS, ids=str)
def test_replays_of_records(method):
    options = {"dtype": torch.bfloat16, "device": "cuda", "slots": 16, "per_page": 16}
    replayed(*(RecordPool(method, (K, D, D), **options) for _ in range(2)))


def replayed(*pools, num_empty=2):
    """Replays in one pool, and the steps of PyTorch in the other, with so many places that are always empty."""
    lengths, places = (700, 333, 0), 3 + num_empty
    steps, scale = 40, D**-0.5
    qkvs = [
        [x[0].transpose(0, 1).to("cuda", torch.bfloat16) for x in oracle.random_qkv(1, H, K, n + steps, D, D, seed=n)]
        for n in lengths
    ]
    for pool in pools:
        for n, qkv in itertools.zip_longest((*lengths, *[0] * num_empty), qkvs):
            request = pool.add(n + steps)
            request.reserve(n + steps)
            if n:
                pool.read([(request, [x[:n] for x in qkv])], scale=scale, backend="torch")
    states = [pool.state(pool.requests) for pool in pools]
    q = torch.zeros(places, H, D, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.zeros(places, K, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out, want = (torch.zeros_like(q) for _ in range(2))
    seen = torch.zeros(places, dtype=torch.int32, device="cuda")

    def step():
        new = NewTokens(list(range(places + 1)), [1] * places, seen, places)
        read_paged((q, k, v), states[0], new, pools[0].plan.settings, scale=scale, out=out, backend="triton")

    def plain_step():
        want.zero_()
        lengths = seen.tolist()
        starts = list(itertools.accumulate((int(n > 0) for n in lengths), initial=0))
        new, alive = NewTokens(starts, lengths, seen), seen > 0
        read = torch.zeros_like(q[alive])
        qkv = q[alive], k[alive], v[alive]
        read_paged(qkv, states[1], new, pools[0].plan.settings, scale=scale, out=read, backend="torch")
        want[alive] = read

    # with no request in any place nothing is written
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    # A rounding is off by at most eps / 2 of its number. Both round the output, of size |want|. Kernels round the
    # weights too, and both the unpacked entries: of sum(p * |v|), which for normal values is at most about 1 + |want|.
    # Together eps / 2 of 2 * |want| + 3 * (1 + |want|), so of at most 5 * (1 + |want|)
    tolerance, near = 5 / 2 * torch.finfo(torch.bfloat16).eps, []
    for i in range(steps):
        for row, (n, qkv) in enumerate(zip(lengths, qkvs, strict=True)):
            alive = row != 1 or i % 3 != 2
            t = n + i - (i // 3 if row == 1 else 0)
            seen[row] = t + 1 if alive else 0
            for x, y in zip((q, k, v), qkv, strict=True):
                x[row] = y[t] if alive else torch.nan
        graph.replay()
        plain_step()
        assert not out[seen == 0].any()
        near.append(((out - want).abs() <= tolerance * (1 + want.abs())).all(-1))
    # but for the few rows whose choice had a near tie, or that have a code near the middle
    assert float(torch.stack(near).double().mean()) >= 0.98
    assert torch.equal(*(pool.blocks[NULL] for pool in pools))
