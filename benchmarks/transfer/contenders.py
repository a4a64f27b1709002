"""Settings that are compared at one length, by label, in the order in which they are measured, and their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel
from variants import Answers, Cache, Rounded

from condense import Method, Recall
from condense.models import MethodChoice
from condense.models.inspect import inspect

WINDOW = 256
# what is claimed; the store's place changes no result
EIGHTH = Recall(window=WINDOW, num_recall=0.125, min_recall=0, entry_bits=4, store_bits=4)
CACHE = Cache()
Arm = Method | Mapping[str, Method] | Cache | Answers | None


def arms(length: int) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """The arms that decide, dense attention (None) first, and others for the time that is left.

    Where all groups of a setting would be open it is dense attention over what is stored, and left out.
    """
    rounded = {name: value for name, value in EIGHTH.to_dict().items() if name not in ("method", "store_bits")}
    first: dict[str, Arm] = {
        "dense": None,
        "1/8": Answers(EIGHTH),
        "1/4": Answers(EIGHTH.replace(num_recall=0.25)),
        "cache of 4 bits": CACHE,
        "256": Answers(EIGHTH.replace(num_recall=256)),
        "1/16": Answers(EIGHTH.replace(num_recall=0.0625)),
        "1/4, the first layer too": Answers(EIGHTH.replace(num_recall=0.25), EIGHTH.replace(num_recall=0.25)),
    }
    second: dict[str, Arm] = {
        "1/8, window 1024": Answers(EIGHTH.replace(window=1024)),
        "1/8, dropped": Answers(EIGHTH.replace(unchosen="drop")),
        "1/8, values 3": Answers(Rounded(**rounded, value_bits=3)),
        "1/8, 16 bits": Answers(EIGHTH.replace(store_bits=16)),
        "1/8, groups of 8": Answers(EIGHTH.replace(group_size=8)),
        "1/8, groups of 32": Answers(EIGHTH.replace(group_size=32)),
        "128": Answers(EIGHTH.replace(num_recall=128)),
    }

    def chooses(arm: Arm) -> bool:
        method = arm.method if isinstance(arm, Answers) else arm
        groups = (length - getattr(method, "window", 0)) // getattr(method, "group_size", 1)
        return not isinstance(method, Recall) or 0 <= method.quota.at(groups) < groups

    first, second = ({name: arm for name, arm in group.items() if chooses(arm)} for group in (first, second))
    return first, second


def costs(model: PreTrainedModel, arm: Arm, length: int) -> dict[str, Any]:
    """Bytes of all layers as shares of dense attention's: kept on the device, in host memory where the store is there
    (host_store: what the device then keeps, with a slot for each open group), and read by one step.
    """
    config: Any = model.config
    if isinstance(arm, Cache):
        return arm.costs(length, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if arm is None:
        return {"device": 1.0, "read": 1.0}
    if not isinstance(arm, Answers):
        return _bytes(model, arm, length)
    method = arm.method
    stored = replace(arm, method=method.stored) if isinstance(method, Rounded) else arm
    layers = stored.in_layers(config)
    result = _bytes(model, layers, length)
    opened = method.quota.at((length - method.window) // method.group_size)
    hosted = layers | {"rest": layers["rest"].replace(store="host", slots=opened)}
    result["host_store"] = _bytes(model, hosted, length)["device"]
    if isinstance(method, Rounded):
        full = sum(row.method is not None for row in inspect(model, layers, length))
        saved = method.saved(model.config.head_dim) / (4 * model.config.head_dim)
        of_open = (1 + (full - 1) * opened * method.group_size / length) / full
        shares = {"device": 1.0, "host_store": of_open, "read": of_open}
        result = {name: share - saved * shares[name] for name, share in result.items()}
    return result


def _bytes(model: PreTrainedModel, choice: MethodChoice, length: int) -> dict[str, float]:
    """Bytes on the device and read by a step, as shares of dense attention's in the layers of a choice."""
    rows = [row for row in inspect(model, choice, length) if row.method is not None]
    dense = sum(row.dense_bytes for row in rows)
    return {"device": sum(row.bytes for row in rows) / dense, "read": sum(row.read_bytes for row in rows) / dense}
