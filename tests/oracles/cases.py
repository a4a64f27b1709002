"""Methods to test properties on: one per kind of rule and state, with settings small enough for loops."""

import itertools

import torch

from condense.methods import CCA, DGA, LCA, Dense, LMInfinite, Recall, StreamingLLM
from oracles.oracle import random_qkv

SUMMARIES = ("last", "streaming", "prompt")
POOLINGS = ("weighted", "mean", "max", "select")

# one method per kind of rule and state; most properties are checked on these
PLANS = {
    "dense": Dense(),
    "streaming_llm": StreamingLLM(sink=3, window=7),
    "streaming_llm-no-sink": StreamingLLM(sink=0, window=5),
    "lm_infinite": LMInfinite(n_global=6, window=4),
    "cca": CCA(group_size=4, window=8),
    "cca-log_size": CCA(group_size=4, window=8, rep_bias="log_size"),
    "cca-window0": CCA(group_size=4, window=0),
    "cca-odd-window": CCA(group_size=4, window=5),
    "cca-g1": CCA(group_size=1, window=3),
    "cca-streaming": CCA(group_size=4, window=6, summary="streaming"),
    "cca-streaming-window0": CCA(group_size=5, window=0, summary="streaming"),
    "lca": LCA(group_size=4, window=8),
    "lca-log_size": LCA(group_size=5, window=3, rep_bias="log_size"),
    "lca-1-query": LCA(group_size=4, window=6, num_summary_queries=1),
    "lca-3-queries": LCA(group_size=4, window=6, num_summary_queries=3),
    "lca-9-queries": LCA(group_size=4, window=3, num_summary_queries=9),
    "lca-mean-max": LCA(group_size=4, window=6, key_pooling="mean", value_pooling="max"),
    "lca-4-bits": LCA(group_size=4, window=6, rep_bias="log_size", entry_bits=4),
    "dga": DGA(group_size=4, gamma=0.3),
    "dga-window0": DGA(group_size=4, window=0, gamma=0.1),
    "dga-no-focal-log_size": DGA(group_size=5, window=5, gamma=0, rep_bias="log_size"),
    "dga-all-focal": DGA(group_size=3, gamma=1),
    "dga-streaming-log_size": DGA(group_size=4, window=5, gamma=0.3, summary="streaming", rep_bias="log_size"),
    "dga-streaming-window0": DGA(group_size=3, window=0, gamma=0.5, summary="streaming"),
    "dga-random": DGA(group_size=4, gamma=0.5, focal="random", seed=3),
    "matched-cca": CCA(group_size=4, window=5, rep_bias="matched"),
    "matched-mean": CCA(group_size=4, window=0, key_pooling="mean", value_pooling="mean", rep_bias="matched"),
    "matched-g1": CCA(group_size=1, window=3, rep_bias="matched"),
    "matched-lca": LCA(group_size=3, window=4, rep_bias="matched"),
    "matched-lca-9-queries": LCA(group_size=4, window=3, num_summary_queries=9, rep_bias="matched"),
    "matched-dga": DGA(group_size=4, gamma=0.3, rep_bias="matched"),
    "matched-dga-streaming": DGA(group_size=3, window=4, gamma=0.5, summary="streaming", rep_bias="matched"),
    "matched-dga-no-focal": DGA(group_size=5, window=2, gamma=0, rep_bias="matched"),
}

PROMPTS = {
    "prompt": CCA(group_size=4, window=8, summary="prompt"),
    "prompt-select": LCA(group_size=4, window=5, summary="prompt", rep_bias="log_size"),
    "prompt-1-query": CCA(group_size=4, window=5, summary="prompt", num_summary_queries=1),
    "prompt-9-queries": CCA(group_size=4, window=0, summary="prompt", num_summary_queries=9),
    "prompt-matched": CCA(group_size=4, window=6, summary="prompt", rep_bias="matched"),
    "prompt-1000-queries": CCA(group_size=4, window=3, summary="prompt", num_summary_queries=1000),
}

_SAMPLED = {"num_recent": 1, "num_random": 9, "seed": 5, "summary": "streaming", "rep_bias": "log_size"}
SELECTIONS = {
    "select": DGA(group_size=4, gamma=0.2, min_focal=3, selection="prompt", num_recent=3, num_random=4),
    "select-log_size": DGA(group_size=3, window=0, gamma=0.3, min_focal=0, selection="prompt", **_SAMPLED),
    "select-no-focal": DGA(group_size=2, gamma=0, min_focal=0, selection="prompt", num_random=0),
    "select-random": DGA(group_size=4, window=5, gamma=0.5, min_focal=1, selection="prompt", focal="random", seed=2),
    "select-not-complementary": DGA(
        group_size=5, gamma=0.1, min_focal=4, selection="prompt", complementary=False, rep_bias="log_size"
    ),
    "select-all": DGA(group_size=4, selection="prompt", rep_bias="log_size"),
    "select-gamma1": DGA(group_size=4, gamma=1, min_focal=0, selection="prompt"),
}

RECALL = Recall(group_size=4, window=6, num_recall=2, min_recall=2)
RECALLS = {
    "two-open": RECALL,
    "drop": RECALL.replace(window=5, num_recall=3, unchosen="drop"),
    "g6": Recall(group_size=6, window=3, num_recall=1e-9, min_recall=1),
    "window0": Recall(group_size=3, window=0, num_recall=2),
    "g1": Recall(group_size=1, window=4, num_recall=5),
    "store-8": RECALL.replace(store_bits=8),
    "a-quarter": RECALL.replace(num_recall=0.25),
    "all-open": RECALL.replace(num_recall=999),
}

GRID = {
    f"{summary}-{key}-{value}": CCA(group_size=4, window=5, summary=summary, key_pooling=key, value_pooling=value)
    for summary, key, value in itertools.product(SUMMARIES, POOLINGS, POOLINGS)
}

# for error budgets: realistic sizes, and no choices that may differ between two precisions
METHODS = {
    "dense": Dense(),
    "streaming_llm": StreamingLLM(sink=4, window=33),
    "cca": CCA(group_size=8, window=32),
    "cca-log_size": CCA(group_size=8, window=32, rep_bias="log_size"),
    "streaming-log_size": CCA(group_size=16, window=17, summary="streaming", rep_bias="log_size"),
    "streaming-mean-max": CCA(group_size=4, window=8, summary="streaming", key_pooling="mean", value_pooling="max"),
    # the choice of an anchor is discontinuous: with one summary query, all runs choose by bit-equal scores
    "lca-log_size": LCA(group_size=8, window=32, num_summary_queries=1, rep_bias="log_size"),
    # the choice of focal tokens by scores is discontinuous too, so they are chosen at random
    "dga-log_size": DGA(group_size=8, gamma=0.2, focal="random", rep_bias="log_size"),
    "dga-select": DGA(group_size=8, min_focal=20, selection="prompt", focal="random", seed=1, allow_future=True),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# B, H, K, L, D, Dv
SHAPES = {"ratio1": (1, 2, 2, 190, 64, 64), "ratio4": (1, 4, 1, 190, 32, 48)}


def inputs_for(name, shape, dtype, *, logits=1.0):
    """q, k, v of a shape of ``SHAPES`` for a method of ``METHODS``; logits: factor of all queries."""
    B, H, K, L, D, Dv = shape
    if name == "lca-log_size":
        K = H
    q, k, v = random_qkv(B, H, K, L, D, Dv, dtype=dtype)
    return q * logits, k, v
