"""Models trained dense only, evaluated with methods that they never saw: what Recall keeps of them, as data."""

from __future__ import annotations

from studies import Run

from condense import CCA, Dense, Method, Recall, StreamingLLM
from condense.train import PhaseConfig

WINDOW = 256
GROUP = 16
LENGTHS = (512, 4096, 16384)
# 65,536 tokens a step: length -> steps, sequences, hidden numbers
_TRAINING = {512: (1000, 128, (2, 8)), 4096: (400, 16, (4, 36)), 16384: (150, 4, (8, 72))}


def methods(length: int) -> dict[str, Method]:
    """By the labels of the rows; the most telling first."""
    entries = WINDOW + (length - WINDOW) // GROUP  # what CCA keeps
    condensed = CCA(group_size=GROUP, window=WINDOW, rep_bias="log_size")
    recall = Recall(group_size=GROUP, window=WINDOW)
    chosen = {4096: (16, 8, 4, 32), 16384: (64, 32, 16, 128)}[length]
    rows: dict[str, Method] = {
        "dense": Dense(),
        "window": StreamingLLM(sink=4, window=entries - 4),
        **{f"recall r={r}": recall.replace(num_recall=r) for r in chosen},
        "cca": condensed.replace(key_pooling="mean", value_pooling="mean"),
        "cca select": condensed.replace(summary="streaming", key_pooling="select"),
    }
    for r in chosen[: 2 if length <= 4096 else 1]:
        few = recall.replace(num_recall=r)
        rows |= {
            f"recall r={r} bits=4": few.replace(index_bits=4),
            f"recall r={r} sub_means of 4": few.replace(index="sub_means", index_size=4),
            f"recall r={r} drop": few.replace(unchosen="drop"),
            # Quest: bounds of whole groups, nothing in place of the others
            f"quest r={r}": few.replace(index_size=GROUP, index_bits=16, unchosen="drop"),
        }
        if length <= 4096:
            rows |= {
                f"recall r={r} bits=16": few.replace(index_bits=16),
                f"recall r={r} sub_means of 8": few.replace(index="sub_means"),
                f"recall r={r} bounds of 16": few.replace(index_size=GROUP),
                f"recall r={r} bounds of 4": few.replace(index_size=4),
                f"recall r={r} w=128": few.replace(window=128),
                f"recall r={r} w=1024": few.replace(window=1024),
            }
    r = chosen[0]
    rows |= {
        f"recall g={g} r={r * GROUP // g}": recall.replace(group_size=g, num_recall=r * GROUP // g) for g in (8, 32)
    }
    return rows


def zero_shot_runs(seed: int) -> list[Run]:
    """Dense models of each architecture at growing lengths, each trained on from the one before."""
    runs = []
    for architecture in ("llama-16k", "gqa4-16k", "mla-16k"):
        base = None
        for length, (steps, batch, keys) in _TRAINING.items():
            phase = PhaseConfig(
                name="dense", steps=steps, sequence_length=length, batch_size=batch,
                learning_rate=2e-3 if base is None else 1e-3, warmup_steps=100 if base is None else 20,
                task_share=0.6, keys=keys, checkpoint_steps=10**6, logging_steps=100,
            )  # fmt: skip
            name = f"zero-{architecture.removesuffix('-16k')}-{length}-s{seed}"
            runs.append(Run(name, architecture, seed, phase, base, methods(length) if length > LENGTHS[0] else {}))
            base = name
    return runs
