"""Error budgets of low precision, shared by the CPU and the CUDA tests; see ops/test_error_budget.py."""

import oracle
import torch

from condense import CCA, DGA, LCA, Dense, StreamingLLM

METHODS = {
    "dense": Dense(),
    "streaming_llm": StreamingLLM(sink=4, window=33),
    "cca": CCA(group_size=8, window=32),
    "cca-log_size": CCA(group_size=8, window=32, rep_bias="log_size"),
    "streaming-log_size": CCA(group_size=16, window=17, summary="streaming", rep_bias="log_size"),
    "streaming-mean-max": CCA(group_size=4, window=8, summary="streaming", key_pooling="mean", value_pooling="max"),
    # anchors are discontinuous: one query per group and KV head, so that all runs choose by the same numbers
    "lca-log_size": LCA(group_size=8, window=32, num_summary_queries=1, rep_bias="log_size"),
    # so are choices by scores: focal tokens by lot
    "dga-log_size": DGA(group_size=8, gamma=0.2, focal="random", rep_bias="log_size"),
    "dga-select": DGA(group_size=8, min_focal=20, selection="prompt", focal="random", seed=1, allow_future=True),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# B, H, K, L, D, Dv
SHAPES = {"ratio1": (1, 2, 2, 190, 64, 64), "ratio4": (1, 4, 1, 190, 32, 48)}


def errors(got, want):
    difference = (got.double() - want).abs()
    return torch.stack([difference.max(), difference.mean()])


def band(want, dtype):
    """One unit in the last place: of the largest value for the largest error, on average for the mean one."""
    return torch.finfo(dtype).eps * torch.stack([want.abs().max(), want.abs().mean()])


def inputs_for(name, shape, dtype, *, logits=1.0):
    B, H, K, L, D, Dv = shape
    if name == "lca-log_size":
        K = H
    q, k, v = oracle.random_qkv(B, H, K, L, D, Dv, dtype=dtype)
    return q * logits, k, v
