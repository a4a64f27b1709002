"""What is measured: methods in all layers, and what `condense calibrate` chooses from."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from condense import CCA, DGA, LCA, CalibrationConfig, Dense, Method, Recall, StreamingLLM
from condense.methods.grouped import GroupPooling

GROUP, WINDOW, SINKS = 16, 256, 4
# shares of the dense cache at which methods are compared; those that can have any size get these
SHARES = (0.05, 0.09, 0.16, 0.25)
BUDGET = 0.02
NUMBERS = 32  # hidden in each text of a calibration
_PLACED: dict[str, Any] = {"group_size": GROUP, "window": WINDOW}
# the pooling that does best without training, and the one that does best with it
POOLED = CCA(**_PLACED, key_pooling="mean", value_pooling="mean", rep_bias="log_size")
TRAINED = CCA(**_PLACED, summary="streaming", key_pooling="select", rep_bias="log_size")
# for models with latents
LATENT = LCA(**_PLACED, rep_bias="log_size")


def recall(length: int) -> Recall:
    """Recall as small models need it: a sixteenth of the groups open, the store in host memory."""
    num = length // GROUP // 16
    return Recall(**_PLACED, num_recall=num, store="host", slots=num // 4, index_size=GROUP, index_bits=4)


def coarse(length: int) -> Recall:
    """The same number of open tokens in groups of twice the size."""
    num = length // GROUP // 32
    return recall(length).replace(group_size=2 * GROUP, index_size=GROUP, num_recall=num, slots=num // 4)


def stored(length: int) -> Recall:
    """In groups of twice the size, an eighth of them open, the store on the device in 4 bits: open groups take no room
    there.
    """
    num = length // GROUP // 16
    return coarse(length).replace(store="device", store_bits=4, num_recall=num)


def methods(length: int, pooled: GroupPooling) -> dict[str, Method]:
    """By the labels of the rows, but `nearest`; dense attention, which all others are compared to, first."""
    windows = {share: StreamingLLM(sink=SINKS, window=round(share * length) - SINKS) for share in SHARES}
    rows: dict[str, Method] = {
        "dense": Dense(),
        **{f"window {share:.0%}": window for share, window in windows.items()},
        **{f"{pooled.name} g={g}": pooled.replace(group_size=g) for g in (32, 16, 8)},
        "lca of its paper": LCA(**_PLACED),
    }
    hosted, kept = recall(length), stored(length)
    rows["recall 4-bit store"] = kept
    if isinstance(pooled, LCA):
        return rows
    fine = hosted.replace(index_size=GROUP // 2)
    return rows | {
        "cca of its paper": CCA(**_PLACED),
        "dga of its paper": DGA(**_PLACED),
        "recall": hosted,
        "recall fewer open": fine.replace(num_recall=hosted.num_recall // 2, slots=hosted.slots // 2),
        "recall g=32": coarse(length),
        "recall drop": hosted.replace(unchosen="drop"),
        "recall drop, finer index": fine.replace(unchosen="drop"),
        "quest": hosted.replace(index_bits=16, unchosen="drop"),
        "recall 8-bit store": kept.replace(store_bits=8),
        "cca entries of 4 bits": pooled.replace(entry_bits=4),
        "recall entries of 4 bits": hosted.replace(entry_bits=4),
    }


def _more(method: Recall) -> Recall:
    """With twice as many open groups."""
    return method.replace(num_recall=2 * method.num_recall)


def _dropping(method: Recall) -> Recall:
    """Without entries, and with twice as many open groups."""
    return _more(method).replace(unchosen="drop")


def nearest(length: int) -> dict[str, Method]:
    """What comes nearest to the study's goals in all layers, by label, after dense attention."""
    kept = stored(length).replace(entry_bits=4)
    fine = recall(length).replace(index_size=GROUP // 2)
    few = fine.replace(entry_bits=4)
    return {
        "dense": Dense(),
        "recall 4-bit store, entries of 4 bits": kept,
        "recall 4-bit store, entries of 4 bits, more open": _more(kept),
        "recall 4-bit store, drop": _dropping(kept),
        "recall 8-bit store, drop": _dropping(kept).replace(store_bits=8),
        "recall finer index": fine,
        "recall finer index, entries of 8 bits": fine.replace(entry_bits=8),
        "recall finer index, entries of 4 bits": few,
        "recall finer index, entries of 4 bits, more open": _more(few),
        "recall entries of 4 bits, more open": _more(few.replace(index_size=GROUP)),
        "recall drop, finer index, more open": _dropping(fine),
        "recall drop, more open": _dropping(recall(length)),
    }


def latents(length: int) -> dict[str, Method]:
    """What decides on latents, whose query heads all open the same groups: how many of them, by which index, in how
    many bits, by label; after dense attention.
    """
    groups = length // GROUP
    hosted = recall(length).replace(entry_bits=4)
    indexes: dict[str, dict[str, Any]] = {
        "bounds of 16": {"index_size": 16},
        "bounds of 8": {"index_size": 8},
        "bounds of 4": {"index_size": 4},
        "means of 8": {"index": "sub_means", "index_size": 8},
        "means of 4": {"index": "sub_means", "index_size": 4},
        "bounds of 8 in 16 bits": {"index_size": 8, "index_bits": 16},
    }
    rows: dict[str, Method] = {"dense": Dense()}
    for part in (8, 4, 2):
        for name, settings in indexes.items() if part > 2 else [*indexes.items()][:2]:
            rows[f"1/{part} open, {name}"] = hosted.replace(num_recall=groups // part, **settings)
    for part in (4, 2):
        rows[f"1/{part} open, bounds of 16, drop"] = hosted.replace(num_recall=groups // part, unchosen="drop")
    kept = stored(length).replace(num_recall=groups // 4, entry_bits=4)
    for bits in (8, 4):
        rows[f"{bits}-bit store, half open"] = kept.replace(store_bits=bits)
        rows[f"{bits}-bit store, half open, drop"] = kept.replace(store_bits=bits, unchosen="drop")
        rows[f"{bits}-bit store, all open"] = kept.replace(store_bits=bits, num_recall=groups)
    return rows


def biases(trained: GroupPooling) -> dict[str, GroupPooling]:
    """What a model is adapted to: the same pooling with other biases, by label."""
    matched = trained.replace(rep_bias="matched")
    return {
        "bias log_size": trained,
        "bias matched": matched,
        "bias matched, weighted keys": matched.replace(key_pooling="weighted"),
    }


def opened(length: int) -> dict[str, Method]:
    """Recall with more and more open groups, by label, after dense attention: powers of two around what is needed."""
    most = length // GROUP // 8
    base = Recall(**_PLACED)
    return {"dense": Dense(), **{f"r={most >> i}": base.replace(num_recall=most >> i) for i in (4, 3, 2, 1, 0)}}


def calibrations(length: int, texts: int, seed: int, pooled: GroupPooling) -> Mapping[str, list[CalibrationConfig]]:
    """By where the tokens of recalling layers lie: one configuration per goal, the budget first; entries in 4 bits."""
    few = pooled.replace(entry_bits=4)
    entries = (few, few.replace(group_size=2 * GROUP))
    windows = tuple(StreamingLLM(sink=SINKS, window=w - SINKS) for w in (WINDOW, 2 * WINDOW))
    # query heads that share keys, as all do on latents, open the same groups and need more of them
    hosted, kept = _more(recall(length)), _more(_more(stored(length)))
    hosted = _more(hosted) if isinstance(pooled, LCA) else hosted
    pooling, dropping = {"entry_bits": 4}, {"unchosen": "drop"}
    recalling = {
        "host": [
            hosted.replace(index_size=GROUP // 2, **pooling),
            *(method.replace(**others) for method in (hosted, _more(hosted)) for others in (pooling, dropping)),
        ],
        "device": [kept.replace(**pooling), *(kept.replace(store_bits=bits, **dropping) for bits in (8, 4))],
    }
    goals = [(BUDGET, None), *product([None], SHARES)]
    return {
        place: [
            CalibrationConfig(
                budget_nats=nats,
                cache=share,
                candidates=(Dense(), *of, *entries, *windows),
                length=length,
                texts=texts,
                hidden_numbers=NUMBERS,
                timed=False,
                seed=seed,
            )
            for nats, share in goals
        ]
        for place, of in recalling.items()
    }
