"""Settings that are compared at one length, by label, in the order in which they are measured, and their bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from variants import Answers, Cache, Rounded

from condense import Method, Recall
from condense.models.inspect import inspect

WINDOW = 256
# what is claimed, in all layers; the store's place changes no result
DEVICE = Method.parse("recall-device").replace(prompt="recall")
CACHE = Cache()
Arm = Method | Mapping[str, Method] | Cache | Answers | None


def arms(length: int) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """The arms that decide, dense attention (None) first, and others for the time that is left.

    Where all groups of a setting would be open it is dense attention over what is stored, and left out.
    """
    rounded = {name: value for name, value in DEVICE.to_dict().items() if name not in ("method", "store_bits")}
    host = Method.parse("recall-host").num_recall
    first: dict[str, Arm] = {
        "dense": None,
        "recall-device": Answers(DEVICE),
        "cache of 4 bits": CACHE,
        "1/8": Answers(DEVICE.replace(num_recall=0.125)),
        "recall-host": Answers(DEVICE.replace(num_recall=host)),
        "16 bits": Answers(DEVICE.replace(store_bits=16)),
    }
    second: dict[str, Arm] = {
        "values 3": Answers(Rounded(**rounded, value_bits=3)),
        "keys 4, values 3": Answers(Rounded(**rounded, key_bits=4, value_bits=3)),
        "1/2": Answers(DEVICE.replace(num_recall=0.5)),
        "1/16": Answers(DEVICE.replace(num_recall=0.0625)),
        "groups of 8": Answers(DEVICE.replace(group_size=8)),
        "window 1024": Answers(DEVICE.replace(window=1024)),
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
    if isinstance(arm, Answers):
        arm = arm.method
    config: Any = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if isinstance(arm, Cache):
        return arm.costs(length, width)
    if isinstance(arm, Rounded):
        result, saved = costs(model, arm.stored, length), arm.saved(width) / (4 * width)
        opened = arm.quota.at((length - arm.window) // arm.group_size) * arm.group_size / length
        shares = {"device": 1.0, "host_store": opened, "read": opened}
        return {name: share - saved * shares[name] for name, share in result.items()}
    if arm is None:
        return {"device": 1.0, "read": 1.0}
    rows = [row for row in inspect(model, arm, length) if row.method is not None]
    dense = sum(row.dense_bytes for row in rows)
    reads = [re.search(r"reads ([\d,]+) bytes", row.remark or "") for row in rows]
    read = sum(int(found[1].replace(",", "")) if found else row.bytes for found, row in zip(reads, rows, strict=True))
    result = {"device": sum(row.bytes for row in rows) / dense, "read": read / dense}
    if isinstance(arm, Recall):
        opened = arm.quota.at((length - arm.window) // arm.group_size)
        hosted = inspect(model, arm.replace(store="host", slots=opened), length)
        result["host_store"] = sum(row.bytes for row in hosted if row.method is not None) / dense
    return result
