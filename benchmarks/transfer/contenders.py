"""What is compared at one length: settings by label, in the order in which they are measured, and their bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from variants import Grid, Variant

from condense import Method, Recall, StreamingLLM
from condense.models.inspect import inspect

GROUP, WINDOW = 16, 256
# what is claimed, in all layers; the store's place changes no result
DROP = Recall(group_size=GROUP, window=WINDOW, num_recall=0.25, unchosen="drop")
POOL = DROP.replace(unchosen="pool", key_pooling="mean", value_pooling="mean", rep_bias="log_size", entry_bits=4)
# a dense cache after KIVI (arXiv:2402.02750): the newest tokens exact, steps of keys' channels for 64 tokens
CACHE = Variant(1.0, 64, 128, Grid(turned=False))
TURNED = Variant(grid=Grid())
Arm = Method | Mapping[str, Method] | Variant | None


def arms(length: int, central: bool) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """The arms that decide, dense attention (None) first, and others for the time that is left: second looks, which
    are slow, decide at the ``central`` length alone.

    Where all groups of a setting would be open it is dense attention and left out.
    """
    groups = (length - WINDOW) // GROUP
    wide = DROP.replace(group_size=2 * GROUP)
    first: dict[str, Arm] = {
        "dense": None,
        "drop 1/4": DROP,
        "drop 1/4, store 4": DROP.replace(store_bits=4),
        "drop 1/4, groups of 32, store 4": wide.replace(store_bits=4),
        "drop 1/4, turned 4": TURNED,
        **{f"drop 1/4, every {n}": Variant(every=n) for n in (2, 4, 8, 16)},
        **{f"drop 1/4, every {n}, before": Variant(every=n, before=True) for n in (1, 8)},
        "log 1/4, store 4": POOL.replace(store_bits=4),
        "log 1/4, groups of 32, store 4": POOL.replace(store_bits=4, group_size=2 * GROUP),
        "cache of 4 bits": CACHE,
        "cache of 4 bits, turned": Variant(1.0, 64, 128, Grid()),
        "drop 1/8": DROP.replace(num_recall=0.125),
        "drop 1/8, turned 4": Variant(0.125, grid=Grid()),
        "drop 1/4, groups of 32, turned 4": Variant(group=2 * GROUP, grid=Grid()),
        "drop 1/4, groups of 32, turned 4, every 16": Variant(group=2 * GROUP, grid=Grid(), every=16),
        "drop 256, store 4": DROP.replace(num_recall=256, store_bits=4),
        "log 1/4": POOL,
        "window 25%": StreamingLLM(sink=4, window=length // 4 - 4),
    }
    looks: dict[str, Arm] = {f"drop 1/8, turned 4, look {n}": Variant(0.125, grid=Grid(), look=n) for n in (4, 2, 3)}
    second: dict[str, Arm] = {
        "drop 1/4, turned 4, values 3": Variant(grid=Grid(values=3)),
        "drop 1/4, turned 3": Variant(grid=Grid(3, 3)),
        "drop 1/4, turned 3, values too": Variant(grid=Grid(3, 3, values_turned=True)),
        "drop 1/4, turned 3, values 4": Variant(grid=Grid(keys=3)),
        "drop 1/4, turned 4, values too": Variant(grid=Grid(values_turned=True)),
        "cache of 3 bits, turned, values too": Variant(1.0, 64, 128, Grid(3, 3, values_turned=True)),
        "drop 1/4, groups of 32": wide,
        "drop 1/4, groups of 32, turned 4, every 32": Variant(group=2 * GROUP, grid=Grid(), every=32),
        **{f"drop 1/4, every {n}, before": Variant(every=n, before=True) for n in (2, 4, 16)},
        "drop 1/8, every 8": Variant(0.125, every=8),
        "log 1/8": POOL.replace(num_recall=0.125),
        "drop 128": DROP.replace(num_recall=128),
        "drop 1/2": DROP.replace(num_recall=0.5),
    }

    def apart(chosen: dict[str, Arm]) -> dict[str, Arm]:
        return {n: a for n, a in chosen.items() if not isinstance(a, Recall) or a.quota.at(groups) < groups}

    return (apart(first | looks), apart(second)) if central else (apart(first), apart(second | looks))


def costs(model: PreTrainedModel, arm: Arm, length: int) -> dict[str, Any]:
    """Bytes of all layers as shares of dense attention's: kept on the device, in host memory where the store is there
    (host_store: what the device then keeps, with a slot for each open group), and read by one step.
    """
    if isinstance(arm, Variant):
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
