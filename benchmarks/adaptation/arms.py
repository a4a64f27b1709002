"""What is compared: one dense model per seed, and ways of adapting it on the same number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from condense import CCA, Dense, Method, StreamingLLM
from condense.train import PhaseConfig

LENGTH = 2048
OWN = CCA(group_size=16, window=128, summary="streaming", key_pooling="select", rep_bias="log_size")
# with which every adapted model is measured; the window has as many tokens as OWN has entries
MEASURED: Mapping[str, Method] = {
    "condensed": OWN,
    "dense": Dense(),
    "window": StreamingLLM(sink=4, window=244),
    "w = 512": OWN.replace(window=512),
    "g = 8": OWN.replace(group_size=8),
}


@dataclass(frozen=True)
class Arm:
    """One way: ``title`` on the page, the weights that are trained, and what differs in its `PhaseConfig`."""

    title: str
    train: str = "all"
    fields: Mapping[str, Any] = field(default_factory=dict)


_BOTH = {"distill": 1.0, "group_sizes": (4, 8)}
ARMS: Mapping[str, Arm] = {
    "both": Arm("distilled, growing groups", fields=_BOTH),
    "plain": Arm("plain"),
    "distilled": Arm("distilled", fields={"distill": 1.0}),
    "growing": Arm("growing groups", fields={"group_sizes": (4, 8)}),
    "dense": Arm("dense control", fields={"mix": "dense"}),
    "alternate": Arm("both, every other step dense", fields={**_BOTH, "mix": "alternate"}),
    "lora": Arm("both, LoRA of rank 64", train="lora", fields=_BOTH),
    "qkv": Arm("both, q, k, v only", train="qkv", fields=_BOTH),
}


def base_phase(steps: int) -> PhaseConfig:
    """Dense training from random weights, until numbers are found in 512 tokens."""
    return PhaseConfig(
        name="base", steps=steps, sequence_length=512, batch_size=128, learning_rate=2e-3, warmup_steps=100,
        task_share=0.6, keys=(2, 8), checkpoint_steps=10**6, logging_steps=100,
    )  # fmt: skip


def arm_phase(name: str, steps: int) -> PhaseConfig:
    """Adaptation on 32,768 tokens a step."""
    fields: dict[str, Any] = {"mix": "condensed", **ARMS[name].fields}
    return PhaseConfig(
        name=name, steps=steps, sequence_length=LENGTH, batch_size=16, method=OWN, learning_rate=1.5e-3,
        warmup_steps=steps // 10, task_share=0.8, keys=(4, 18), checkpoint_steps=10**6,
        logging_steps=max(1, steps // 20), **fields,
    )  # fmt: skip
