"""Settings that are compared at one length, by label, in the order in which they are measured, and their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from variants import Cache

from condense import Method, Recall, Reread, SnapKV, StreamingLLM
from condense.models import MethodChoice
from condense.models.counts import tokens_left
from condense.models.inspect import inspect

# the named settings; where a store is changes no result, and the device's is read faster
DEVICE, HOST = (Method.parse(name).replace(store="device") for name in ("recall-device", "recall-host"))
CACHE = Cache()
# dense attention (None), a method, methods by layer, or an attention as of `makes.replaced`
Arm = MethodChoice | Cache | None


def arms_of(study: str, length: int) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """The arms of a study, "transfer", "reread" or "calibrated": those that decide, dense attention (None) first, and
    others for the time that is left. "calibrated" has allocations besides, which depend on the model.
    """
    return _of_prompts(length) if study == "reread" else _of_settings(length)


def _of_prompts(length: int) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """Shares of a prompt that its second reading chooses, in 16 and in 4 bits, beside prompts that choose, windows and
    SnapKV, which keep a tenth of the whole text's tokens.
    """
    first: dict[str, Arm] = {"dense": None, "recall-device": DEVICE}
    first |= {f"keep {share:.0%}": DEVICE.replace(prompt="exact", keep=share) for share in (0.75, 0.5)}
    second: dict[str, Arm] = {
        "cache of 4 bits": CACHE,
        "dense prompts": DEVICE.replace(prompt="exact"),
        "keep 25%": DEVICE.replace(prompt="exact", keep=0.25),
        "reread 25%": Reread(share=0.25),
        "reread 10%": Reread(share=0.1),
        "window 10%": StreamingLLM(sink=4, window=length // 10 - 4),
        "snapkv 10%": SnapKV(budget=length // 10),
    }
    return first, second


def _of_settings(length: int) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """`recall-device`, and what differs from it in one setting.

    Where another setting would open all groups, as the named one for the device does in the shortest texts, it is left
    out.
    """
    first: dict[str, Arm] = {"dense": None, "recall-device": DEVICE, "recall-host": HOST}
    second: dict[str, Arm] = {
        "dense prompts": DEVICE.replace(prompt="exact"),
        "cache of 4 bits": CACHE,
        "prompts by Recall": DEVICE.replace(prompt="recall"),
        "128 at least": DEVICE.replace(min_recall=128),
        "128, prompts too": DEVICE.replace(min_recall=128, prompt="recall"),
        "groups of 8": DEVICE.replace(group_size=8, min_recall=2048),
        "dropped": DEVICE.replace(unchosen="drop"),
        "the first layer too": {"rest": DEVICE},
        "16 bits": DEVICE.replace(store_bits=16),
        "window 1024": DEVICE.replace(window=1024),
        "groups of 32": DEVICE.replace(group_size=32, min_recall=512),
    }
    return first, {name: arm for name, arm in second.items() if _chooses(arm, length)}


def _chooses(arm: Arm, length: int) -> bool:
    method = next(iter(arm.values())) if isinstance(arm, Mapping) else arm
    if not isinstance(method, Recall):
        return True
    groups, choice = (length - method.window) // method.group_size, method.layout.choice
    assert choice is not None
    return any(quota.at(groups) < groups for quota in (choice.quota, choice.prompt_quota))


def costs(model: PreTrainedModel, arm: Arm, length: int) -> dict[str, Any]:
    """Bytes of all layers as shares of dense attention's: kept on the device, in host memory where the store is there
    (host_store: what the device then keeps, with a slot for each open group), and read by one step.
    """
    config: Any = model.config
    if isinstance(arm, Cache):
        return arm.costs(length, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if arm is None:
        return {"device": 1.0, "read": 1.0}
    result = _bytes(model, arm, length)
    if isinstance(arm, Recall):
        latents = bool(getattr(config, "kv_lora_rank", None))
        other = arm.of_layer(is_first=False, has_latents=latents)
        opened = other.quota.at((tokens_left(arm, length) - arm.window) // arm.group_size)
        # given for all layers, latents get twice the slots
        hosted = arm.replace(store="host", slots=opened // 2 if latents else opened)
        result["host_store"] = _bytes(model, hosted, length)["device"]
    return result


def _bytes(model: PreTrainedModel, choice: MethodChoice, length: int) -> dict[str, float]:
    """Bytes on the device and read by a step, as shares of dense attention's in the layers of a choice."""
    rows = [row for row in inspect(model, choice, length) if row.method is not None]
    dense = sum(row.dense_bytes for row in rows)
    return {"device": sum(row.bytes for row in rows) / dense, "read": sum(row.read_bytes for row in rows) / dense}
