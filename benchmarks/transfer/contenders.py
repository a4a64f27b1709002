"""Settings that are compared at one length, by label, in the order in which they are measured, and their bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from variants import Answers, Cache

from condense import Method, Recall, StreamingLLM
from condense.models.inspect import inspect

WINDOW = 256
# what is claimed, in all layers; the store's place changes no result
DROP = Recall(group_size=32, window=WINDOW, num_recall=0.25, unchosen="drop", store_bits=4)
POOL = DROP.replace(unchosen="pool", key_pooling="mean", value_pooling="mean", rep_bias="log_size", entry_bits=4)
CACHE = Cache()
Arm = Method | Mapping[str, Method] | Cache | Answers | None


def arms(length: int) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """The arms that decide, dense attention (None) first, and others for the time that is left.

    Where all groups of a setting would be open it is dense attention over what is stored, and left out.
    """
    first: dict[str, Arm] = {
        "dense": None,
        "drop 1/4": DROP,
        "drop 1/4, prompt exact": Answers(DROP),
        "log 1/4, prompt exact": Answers(POOL),
        "drop 1/8, prompt exact": Answers(DROP.replace(num_recall=0.125)),
        "log 1/8, prompt exact": Answers(POOL.replace(num_recall=0.125)),
        "cache of 4 bits": CACHE,
        "groups of 16, drop 256, prompt exact": Answers(DROP.replace(group_size=16, num_recall=256)),
        "groups of 16, log 256, prompt exact": Answers(POOL.replace(group_size=16, num_recall=256)),
        "drop, 5% left, prompt exact": Answers(DROP, left=0.05),
        "log, 5% left, prompt exact": Answers(POOL, left=0.05),
        "log 1/16, prompt exact": Answers(POOL.replace(num_recall=0.0625)),
        "groups of 16, log 1/4, prompt exact": Answers(POOL.replace(group_size=16)),
        "groups of 16, log 1/8, prompt exact": Answers(POOL.replace(group_size=16, num_recall=0.125)),
    }
    second: dict[str, Arm] = {
        "drop, 2% left, prompt exact": Answers(DROP, left=0.02),
        "log, 10% left, prompt exact": Answers(POOL, left=0.1),
        "log, 2% left, prompt exact": Answers(POOL, left=0.02),
        "drop 1/2, prompt exact": Answers(DROP.replace(num_recall=0.5)),
        "drop 1/4, prompt exact, 16 bits": Answers(DROP.replace(store_bits=16)),
        "log 1/4, prompt exact, 16 bits": Answers(POOL.replace(store_bits=16)),
        "log 1/4": POOL,
        "cache of 4 bits, turned": Cache(turned=True),
        "window 25%": StreamingLLM(sink=4, window=length // 4 - 4),
    }

    def chooses(arm: Arm) -> bool:
        method = arm.method if isinstance(arm, Answers) else arm
        groups = (length - WINDOW) // getattr(method, "group_size", 1)
        return not isinstance(method, Recall) or method.quota.at(groups) < groups

    first, second = ({name: arm for name, arm in group.items() if chooses(arm)} for group in (first, second))
    return first, second


def costs(model: PreTrainedModel, arm: Arm, length: int) -> dict[str, Any]:
    """Bytes of all layers as shares of dense attention's: kept on the device, in host memory where the store is there
    (host_store: what the device then keeps, with a slot for each open group), and read by one step.
    """
    if isinstance(arm, Answers):
        arm = arm.costed
    if isinstance(arm, Cache):
        config: Any = model.config
        return arm.costs(length, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
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
