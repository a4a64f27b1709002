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
# what is claimed, in all layers; the store's place changes no result
DROP = Recall(group_size=GROUP, window=WINDOW, num_recall=0.25, unchosen="drop")
POOL = DROP.replace(unchosen="pool", key_pooling="mean", value_pooling="mean", rep_bias="log_size", entry_bits=4)
SHARES = {"1/16": 0.0625, "1/8": 0.125, "1/4": 0.25, "1/2": 0.5}
CHECKED = 4096  # where the kernels are compared with dense attention
Arm = Method | exact.Attention | None


def arms(make: str, length: int, central: bool) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """The arms that decide, dense attention (None) first, and others for the time that is left.

    First the library's own, then, in the time that is left, other indexes with an eighth of the groups open; at the
    ``central`` length all of them, and choices by mass. Where all groups of a setting would be open it is dense
    attention and left out.
    """
    groups = (length - WINDOW) // GROUP
    latents = make.startswith("mla")

    def window(share: float) -> StreamingLLM:
        return StreamingLLM(sink=4, window=round(share * length) - 4)

    first: dict[str, Arm] = {"dense": None}
    if not latents:
        first["cache of 4 bits"] = exact.fewer_bits(4)
    first |= {f"drop {name}": DROP.replace(num_recall=share) for name, share in SHARES.items()}
    first |= {f"drop {num}": DROP.replace(num_recall=num) for num in (128, 256)}
    first |= {
        f"drop {name}, store 4": DROP.replace(num_recall=SHARES.get(name, 256), store_bits=4)
        for name in ("1/8", "1/4", "1/2", "256")
    }
    first |= {f"log {name}": POOL.replace(num_recall=SHARES[name]) for name in ("1/8", "1/4")}
    first["window 25%"] = window(0.25)
    second: dict[str, Arm] = dict(list(indexes(groups // 8).items())[:3])
    if central:
        second |= {**by_mass(groups), f"true tokens: {groups // 8}": best_tokens(groups // 8), **indexes(groups // 8)}
    second |= {
        "none 1/8": POOL.replace(num_recall=0.125, rep_bias="none"),
        "drop 1/4, groups of 32, store 4": DROP.replace(group_size=2 * GROUP, store_bits=4),
        "log 1/8, entries 16": POOL.replace(num_recall=0.125, entry_bits=16),
        "window 9%": window(0.09),
        "cache of 2 bits": exact.fewer_bits(2),
    }

    def apart(chosen: Mapping[str, Arm]) -> dict[str, Arm]:
        return {n: a for n, a in chosen.items() if not isinstance(a, Recall) or a.quota.at(groups) < groups}

    first, second = apart(first), apart(second)
    if length == CHECKED:
        # all groups open: dense attention but for rounding
        first["all open"] = DROP.replace(num_recall=groups + 1)
    return first, {name: arm for name, arm in second.items() if name not in first and _fits(arm, latents)}


def _fits(arm: Arm, latents: bool) -> bool:
    """Whether an arm exists for the make: numbers of an expanded cache of latents mean nothing."""
    return not latents or isinstance(arm, Method)


def claims() -> dict[str, Method | None]:
    """Settings to generate with, through caches and stores; dense attention first."""
    return {"dense": None} | {name: Method.parse(name) for name in ("recall-device", "recall-host")}


def costs(model: PreTrainedModel, name: str, arm: Arm, length: int) -> dict[str, Any]:
    """Bytes of all layers as shares of dense attention's: kept on the device, in host memory where the store is there
    (host_store: what the device then keeps, with a slot for each open group), and read by one step.
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
        opened = arm.quota.at((length - arm.window) // arm.group_size)
        hosted = inspect(model, arm.replace(store="host", slots=opened), length)
        result["host_store"] = sum(row.bytes for row in hosted if row.method is not None) / dense
        reads = [re.search(r"reads ([\d,]+) bytes", row.remark or "") for row in rows]
        result["read"] = sum(int(found.group(1).replace(",", "")) for found in reads if found) / dense
    else:
        result["read"] = result["device"]
    return result
