"""What is compared at one length: settings by label, in the order in which they are measured, and their bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import exact
from choosers import Chooser, best_tokens, by_mass, costs_of, indexes
from transformers import PreTrainedModel

from condense import Method, Recall, StreamingLLM
from condense.models.inspect import inspect

GROUP, WINDOW = 16, 256
# the setting that the project has claimed so far, in all layers; the store's place changes no result
CLAIMED = Recall(
    group_size=GROUP, window=WINDOW, num_recall=128, index_bits=4, entry_bits=4, key_pooling="mean",
    value_pooling="mean", rep_bias="log_size", unchosen="pool",
)  # fmt: skip
DROP, NONE = CLAIMED.replace(unchosen="drop"), CLAIMED.replace(rep_bias="none")
COARSE = {"group_size": 2 * GROUP, "index_size": GROUP}
CHECKED = 4096  # where the kernels are compared with dense attention
Arm = Method | exact.Attention | None


def arms(make: str, length: int, central: bool) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """The arms that decide, dense attention (None) first, and others for the time that is left.

    First the indexes, with an eighth of the groups open; at the ``central`` length all of them, and some also with a
    quarter and a sixteenth. Where all groups of a setting would be open it is dense attention and left out.
    """
    groups = (length - WINDOW) // GROUP
    latents = make.startswith("mla")

    def window(share: float) -> StreamingLLM:
        return StreamingLLM(sink=4, window=round(share * length) - 4)

    def opened(method: Recall, num: int) -> Recall:
        return method.replace(num_recall=num)

    eighth, shares = groups // 8, (groups // 4, groups // 16)
    first: dict[str, Arm] = {"dense": None}
    if not latents:
        first["cache of 4 bits"] = exact.fewer_bits(4)
    if central:
        first["drop 128"] = opened(DROP, 128)
        for num in (eighth, *shares):
            first |= dict(list(indexes(num).items())[:9])
        first |= by_mass(groups)
        first |= {f"true tokens: {eighth}": best_tokens(eighth), **indexes(eighth)}
    else:
        first |= dict(list(indexes(eighth).items())[:9])
        first |= dict(list(by_mass(groups).items())[:4])
    for num in (128, 256, 512) if latents else (128, 256):
        first |= {f"drop {num}": opened(DROP, num), f"log {num}": opened(CLAIMED, num)}
    first["drop 128, store 4"] = opened(DROP, 128).replace(store_bits=4)
    first["window 25%"] = window(0.25)
    quest = DROP.replace(index_size=GROUP, index_bits=16)
    second: dict[str, Arm] = {
        "none 128": opened(NONE, 128),
        "drop 64": opened(DROP, 64),
        "drop 128, groups of 32, store 4": DROP.replace(num_recall=128, store_bits=4, **COARSE),
        "quest 128": quest,
        "drop 256, groups of 32, store 4": DROP.replace(num_recall=256, store_bits=4, **COARSE),
        "drop 512": opened(DROP, 512),
        "drop 128, index 8": opened(DROP, 128).replace(index_bits=8),
        "drop 128, whole groups": opened(DROP, 128).replace(index_size=GROUP),
        "log 128, entries 16": opened(CLAIMED, 128).replace(entry_bits=16),
        "quest 256": opened(quest, 256),
        "drop 32": opened(DROP, 32),
        "window 9%": window(0.09),
        "cache of 2 bits": exact.fewer_bits(2),
        "matched 128": opened(CLAIMED, 128).replace(rep_bias="matched", entry_bits=16),
    }

    def apart(chosen: Mapping[str, Arm]) -> dict[str, Arm]:
        most = groups * GROUP
        return {n: a for n, a in chosen.items() if not isinstance(a, Recall) or a.num_recall * a.group_size < most}

    first, second = apart(first), apart(second)
    if length == CHECKED:
        # all groups open: dense attention but for rounding
        first["all open"] = DROP.replace(num_recall=groups + 1)
    return first, {name: arm for name, arm in second.items() if name not in first and _fits(arm, latents)}


def _fits(arm: Arm, latents: bool) -> bool:
    """Whether an arm exists for the make: numbers of an expanded cache of latents mean nothing."""
    return not latents or isinstance(arm, Method)


def claims(length: int, latents: bool) -> dict[str, Recall | None]:
    """Settings to generate with, through caches and a host store; dense attention first."""
    num = 512 if latents else 128
    hosted = {"store": "host", "slots": num, "num_recall": num}
    return {
        "dense": None,
        "drop, host, store 4": DROP.replace(**hosted, store_bits=4),
        "none, host, store 4": NONE.replace(**hosted, store_bits=4),
        "drop, device, store 4": DROP.replace(num_recall=num, store_bits=4),
        "drop, host": DROP.replace(**hosted),
        "log, host, store 4": CLAIMED.replace(**hosted, store_bits=4),
    }


def costs(model: PreTrainedModel, name: str, arm: Arm, length: int) -> dict[str, Any]:
    """Bytes of all layers as shares of dense attention's: kept on the device, in host memory where the store is there
    (host_store: what the device then keeps), and read by one step.
    """
    if isinstance(arm, Chooser):
        return costs_of(model.config, arm, length)
    if not isinstance(arm, Method):
        bits = re.search(r"cache of (\d+) bits", name)
        width = getattr(model.config, "head_dim", 64) or 64
        share = exact.bits_share(int(bits.group(1)), length, width) if bits else None if arm else 1.0
        return {"device": share, "read": share}
    rows = [row for row in inspect(model, arm, length) if row.method is not None]
    dense = sum(row.dense_bytes for row in rows)
    result: dict[str, Any] = {"device": sum(row.bytes for row in rows) / dense}
    if isinstance(arm, Recall):
        hosted = inspect(model, arm.replace(store="host", slots=min(64, int(arm.num_recall))), length)
        result["host_store"] = sum(row.bytes for row in hosted if row.method is not None) / dense
        reads = [re.search(r"reads ([\d,]+) bytes", row.remark or "") for row in rows]
        result["read"] = sum(int(found.group(1).replace(",", "")) for found in reads if found) / dense
    else:
        result["read"] = result["device"]
    return result
