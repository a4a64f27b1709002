"""Allocations that `condense calibrate` finds for a model of the study, as further arms."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import numpy as np
from contenders import Arm
from texts import Texts
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from condense import CCA, LCA, CalibrationConfig, Method, Recall, StreamingLLM, calibrate

# shares of dense attention's cache that stay on the device, with tokens in host memory
_SHARES = (0.05, 0.09)
_ON_DEVICE = 0.16  # and without
_TEXTS = 6  # that are measured, as many with hidden numbers, and as many again to verify


def kinds(*, latents: bool) -> tuple[Method, ...]:
    """Methods that keep all on the device: Recall of all groups and of 512 (latents: 1,024), pooling, a window."""
    few = Recall(window=256, num_recall=512, prompt="shared", store_bits=4)
    recall, fewer = (few.of_layer(is_first=is_first, has_latents=latents) for is_first in (True, False))
    means = LCA() if latents else CCA(key_pooling="mean", value_pooling="mean")
    means = means.replace(window=256, rep_bias="log_size", entry_bits=4)
    return recall, fewer, means, StreamingLLM(sink=4, window=1024)


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

    On the device alone Recall is measured with all groups open, which takes no more room, and then opens 512 in all
    layers but the first, as the named settings do, so that steps are fast. numbers: how many are hidden in each text.
    measured: how the names of files begin that keep what was measured of the model, for another run to go on from.
    wanted: names of those to find; None: all.
    """
    rng = np.random.default_rng(0)
    texts = [tokenizer.decode(text.stretch(rng, 2 * length)) for _ in range(2 * _TEXTS)]
    recall, fewer, means, window = kinds(latents=bool(getattr(model.config, "kv_lora_rank", None)))
    goals = {f"calibrated to {share:.0%}, host memory": CalibrationConfig(cache=share) for share in _SHARES}
    goals[f"calibrated to {_ON_DEVICE:.0%}"] = CalibrationConfig(cache=_ON_DEVICE, candidates=(recall, means, window))
    asked = {"length": length, "cache_length": 32768, "hidden_numbers": numbers, "texts": _TEXTS}
    found = dict[str, Arm]()
    for name, goal in goals.items():
        if wanted is not None and name not in wanted:
            continue
        # goals with the same candidates share what was measured
        file = measured.with_name(f"{measured.name}-{len(goal.candidates)}.json")
        found[name] = calibrate(model, tokenizer, texts, replace(goal, **asked), measured=file).allocation
    on_device = found.get(f"calibrated to {_ON_DEVICE:.0%}", {})
    for layer in sorted(on_device)[1:]:
        on_device[layer] = fewer if on_device[layer] == recall else on_device[layer]
    return found
