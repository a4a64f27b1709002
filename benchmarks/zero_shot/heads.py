"""Finer than layers: does it pay to recall in single KV heads? As many heads recall, one by one or whole layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rows import POOLED, WINDOW, recall
from transformers import PreTrainedModel
from trial import HeadRecall

from condense import CalibrationConfig
from condense.calibration.measure import Meter
from condense.calibration.samples import Samples

_STEPS = 8  # points between no head and all of them


def by_head(model: PreTrainedModel, samples: Samples, config: CalibrationConfig) -> dict[str, Any]:
    """What pooling each head alone costs, and points of two orders: heads one by one, and whole layers.

    Heads and layers are ordered by what is lost on the measured samples if they alone are pooled and all other heads of
    the layer recall; the points are taken on the held-out ones.
    """
    settings = model.config
    layers, heads = range(settings.num_hidden_layers), range(settings.num_key_value_heads)
    given = recall(config.length).to_dict()
    del given["method"]
    # candidate n recalls in the heads of its binary digits
    candidates = [HeadRecall(**given, heads=tuple(h for h in heads if n >> h & 1)) for n in range(2 ** len(heads))]
    every = len(candidates) - 1
    meter = Meter(model, candidates, samples)
    alone = [{layer: every & ~(1 << head)} for layer in layers for head in heads]
    whole = [{layer: 0} for layer in layers]
    lost = _lost(meter, meter.measured, [*alone, *whole])
    of_heads = lost[: len(alone)].reshape(len(layers), len(heads))
    of_layers = lost[len(alone) :]
    head_order = [divmod(int(i), len(heads)) for i in np.argsort(-of_heads, axis=None)]
    layer_order = np.argsort(-of_layers)
    points = []
    for count in np.linspace(0, len(alone), _STEPS + 1).astype(int):
        chosen = head_order[:count]
        by_heads = {layer: sum(1 << h for i, h in chosen if i == layer) for layer in layers}
        row: dict[str, Any] = {"heads": int(count), "by_head": _point(meter, by_heads)}
        if count % len(heads) == 0:
            recalling = layer_order[: count // len(heads)]
            row["by_layer"] = _point(meter, {layer: every if layer in recalling else 0 for layer in layers})
        points.append(row)
    return {"window": WINDOW, "pooled": POOLED, "lost_by_head": of_heads, "lost_by_layer": of_layers, "points": points}


def _lost(meter: Meter, texts: Sequence[int], allocations: list[dict[int, int]]) -> np.ndarray:
    """Per allocation: mean divergence on plain text plus that on answers, as a calibration counts."""
    readings = [meter.read(i, [{}, *allocations])[1:] for i in texts]
    kinds = [[of for of in readings if bool(of[0].right) is asked] for asked in (False, True)]
    return sum(np.mean([[reading.kl for reading in of] for of in kind], axis=0) for kind in kinds if kind)


def _point(meter: Meter, allocation: dict[int, int]) -> dict[str, float]:
    read = [meter.read(i, [{}, allocation])[1] for i in meter.held_out]
    plain, asked = ([reading for reading in read if bool(reading.right) is kind] for kind in (False, True))
    found = [right for reading in asked for right in reading.right]
    return {
        "kl": float(np.mean([reading.kl for reading in plain])),
        "nats": float(np.mean([reading.nats for reading in plain])),
        "found": float(np.mean(found)),
    }
