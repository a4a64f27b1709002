"""Allocations that `condense calibrate` finds for a model of the study, as further arms."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import numpy as np
from contenders import Arm
from texts import Texts
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from condense import CalibrationConfig, calibrate

# shares of dense attention's cache that stay on the device, with tokens in host memory
_SHARES = (0.05, 0.09)
_ON_DEVICE = 0.16  # and without
_TEXTS = 6  # that are measured, as many with hidden numbers, and as many again to verify


def calibrated(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Texts,
    length: int,
    *,
    numbers: int,
    measured: Path,
    wanted: Container[str] | None = None,
) -> dict[str, Arm]:
    """One allocation per size of the cache, found on texts of ``length`` tokens that the model was trained on.

    numbers: how many are hidden in each text.
    measured: how the names of files begin that keep what was measured of the model, for another run to go on from.
    wanted: names of those to find; None: all.
    """
    rng = np.random.default_rng(0)
    texts = [tokenizer.decode(text.stretch(rng, 2 * length)) for _ in range(2 * _TEXTS)]
    goals = {f"calibrated to {share:.0%}, host memory": CalibrationConfig(cache=share) for share in _SHARES}
    goals[f"calibrated to {_ON_DEVICE:.0%}"] = CalibrationConfig(cache=_ON_DEVICE, host_memory=False)
    asked = {"length": length, "cache_length": 32768, "hidden_numbers": numbers, "texts": _TEXTS}
    found = dict[str, Arm]()
    for name, goal in goals.items():
        if wanted is not None and name not in wanted:
            continue
        # goals with the same candidates share what was measured
        file = measured.with_name(f"{measured.name}-{'host' if goal.host_memory else 'device'}.json")
        found[name] = calibrate(model, tokenizer, texts, replace(goal, **asked), measured=file).allocation
    return found
