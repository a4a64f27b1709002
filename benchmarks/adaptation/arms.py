"""What is compared: one dense model per seed, and ways of adapting it on the same number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from condense import CCA, DGA, LCA, Dense, Method, Recall, StreamingLLM
from condense.train import PhaseConfig
from condense.train.recipes import DEMO_ARCHITECTURE, TINY_MLA_ARCHITECTURE

LENGTH = 8192
EDGES = (0, 512, 1024, 2048, 4096)  # positions between which text loss is averaged
# on ordinary keys this is LCA too
OWN = CCA(group_size=16, window=512, summary="streaming", key_pooling="select", rep_bias="log_size")
# every model is measured with these, besides its own method and dense attention
CONTROLS: Mapping[str, Method] = {
    "window": StreamingLLM(sink=4, window=988),  # as many tokens as OWN has keys for the last query: 480 + 512
    "recall": Recall(group_size=16, window=512, num_recall=32),
}
# settings in which a trained model's method is changed, to measure it without training it again
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "g 8": {"group_size": 8},
    "g 32": {"group_size": 32},
    "w 1,024": {"window": 1024},
    "w 2,048": {"window": 2048},
}
# the bundled model's, and one of its size with latents (MLA)
BASES: Mapping[str, Mapping[str, Any]] = {"base": DEMO_ARCHITECTURE, "base-mla": TINY_MLA_ARCHITECTURE}


@dataclass(frozen=True)
class Arm:
    """One way of adapting.

    title: on the page. base: the dense model that it starts from, of `BASES`. train, lora_rank: as in `TrainConfig`;
    "none": nothing is trained. method: that is adapted to. fields: what differs in its `PhaseConfig`.
    """

    title: str
    base: str = "base"
    train: str = "all"
    lora_rank: int = 64
    method: Method = OWN
    fields: Mapping[str, Any] = field(default_factory=dict)

    def measured(self) -> tuple[Mapping[str, Method], ...]:
        """The methods that the adapted model is measured with, by name: first those that matter most."""
        changed = {name: self.method.replace(**change) for name, change in CHANGES.items()}
        return {"own": self.method, "dense": Dense()}, {**changed, **CONTROLS}


_BOTH: Mapping[str, Any] = {"distill": 1.0, "group_sizes": (4, 8)}
_TWICE: Mapping[str, Any] = {"batch_size": 4}
_FOCAL = DGA(group_size=16, window=512, gamma=0.1, summary="streaming", rep_bias="log_size")
# in the order in which they run: if time ends, the last are missing
ARMS: Mapping[str, Arm] = {
    "dense": Arm("dense control", fields={"mix": "dense"}),
    "both": Arm("distilled, growing groups", fields=_BOTH),
    "growing": Arm("growing groups", fields={"group_sizes": (4, 8)}),
    "plain": Arm("plain"),
    "distilled": Arm("distilled", fields={"distill": 1.0}),
    "both-twice": Arm("both, twice the tokens", fields={**_BOTH, **_TWICE}),
    "dense-twice": Arm("dense control, twice the tokens", fields={"mix": "dense", **_TWICE}),
    "lora-64": Arm("both, LoRA of rank 64", train="lora", fields=_BOTH),
    "qkv": Arm("both, q, k, v only", train="qkv", fields=_BOTH),
    "none": Arm("not adapted", train="none"),
    "alternate": Arm("both, every other step dense", fields={**_BOTH, "mix": "alternate"}),
    "lora-16": Arm("both, LoRA of rank 16", train="lora", lora_rank=16, fields=_BOTH),
    "last": Arm(
        "both, CCA: last query, weighted keys",
        method=CCA(group_size=16, window=512, rep_bias="log_size"),
        fields=_BOTH,
    ),
    "dga": Arm("both, DGA: a tenth focal", method=_FOCAL, fields=_BOTH),
    "matched": Arm("both, matched biases", method=OWN.replace(rep_bias="matched"), fields=_BOTH),
    "unbiased": Arm("both, no bias", method=OWN.replace(rep_bias="none"), fields=_BOTH),
    "half": Arm("both, half of the loss the KL", fields={**_BOTH, "distill": 0.5}),
    "dga-half-twice": Arm(
        "both, DGA with half of the loss the KL and twice the tokens",
        method=_FOCAL,
        fields={**_BOTH, **_TWICE, "distill": 0.5},
    ),
    "wide-1024": Arm("both, window 1,024", method=OWN.replace(window=1024), fields=_BOTH),
    "slow": Arm("both, learning rate 3e-4", fields={**_BOTH, "learning_rate": 3e-4}),
    "fast": Arm("both, learning rate 2e-3", fields={**_BOTH, "learning_rate": 2e-3}),
    "latents": Arm(
        "both, LCA on latents",
        base="base-mla",
        method=LCA(group_size=16, window=512, rep_bias="log_size"),
        fields=_BOTH,
    ),
}


def base_phases(most_steps: int) -> tuple[PhaseConfig, ...]:
    """Dense training from random weights: short texts until numbers are found in them, then longer ones.

    most_steps: of the first phase, which ends earlier once it finds nearly all numbers; the others have a sixth of it
    at most.
    """
    later = most_steps // 6
    shared: dict[str, Any] = {"task_share": 0.6, "checkpoint_steps": 10**6, "logging_steps": 50}
    return (
        PhaseConfig(
            name="short", steps=most_steps, sequence_length=512, batch_size=128, learning_rate=2e-3, warmup_steps=100,
            schedule="constant", keys=(2, 8), **shared,
        ),
        PhaseConfig(
            name="longer", steps=min(250, later), sequence_length=2048, batch_size=32, learning_rate=1.5e-3,
            warmup_steps=20, schedule="constant", keys=(4, 18), **shared,
        ),
        PhaseConfig(
            name="long", steps=min(200, later), sequence_length=LENGTH, batch_size=8, learning_rate=1.5e-3,
            warmup_steps=20, keys=(8, 72), **shared,
        ),
    )  # fmt: skip


def arm_phase(name: str, steps: int) -> PhaseConfig:
    """Adaptation, on 16,384 tokens a step unless the arm says otherwise."""
    arm = ARMS[name]
    fields: dict[str, Any] = {"mix": "condensed", "batch_size": 2, "learning_rate": 1e-3, **arm.fields}
    return PhaseConfig(
        name=name, steps=steps, sequence_length=LENGTH, method=arm.method,
        warmup_steps=steps // 20, task_share=0.8, keys=(8, 72), checkpoint_steps=10**6,
        logging_steps=max(1, steps // 20), **fields,
    )  # fmt: skip
