"""What is measured: methods in all layers, and what `condense calibrate` chooses from."""

from __future__ import annotations

from collections.abc import Mapping

from trial import RoundedCCA, RoundedRecall

from condense import CCA, CalibrationConfig, Dense, Method, Recall, StreamingLLM

GROUP, WINDOW, SINKS = 16, 256, 4
SHARES = (0.05, 0.09, 0.16, 0.25)  # of the dense cache, for methods whose size can be set freely
GOALS = {"host": (0.05, 0.07, 0.09), "device": (0.1, 0.16, 0.2)}
BUDGET = 0.02
NUMBERS = 16  # hidden in each text of a calibration
# what does best without training, and with it
POOLED = CCA(group_size=GROUP, window=WINDOW, key_pooling="mean", value_pooling="mean", rep_bias="log_size")
TRAINED = CCA(group_size=GROUP, window=WINDOW, summary="streaming", key_pooling="select", rep_bias="log_size")


def recall(length: int) -> Recall:
    """Recall as small models need it: a sixteenth of the groups open, the store in host memory."""
    num = length // GROUP // 16
    return Recall(
        group_size=GROUP, window=WINDOW, num_recall=num, store="host", slots=num // 4, index_size=GROUP, index_bits=4
    )


def coarse(length: int) -> Recall:
    """The same number of open tokens in groups of twice the size."""
    num = length // GROUP // 32
    return recall(length).replace(group_size=2 * GROUP, index_size=GROUP, num_recall=num, slots=num // 4)


def methods(length: int, pooled: CCA = POOLED) -> dict[str, Method]:
    """By the labels of the rows; dense attention, which all others are compared to, first."""
    hosted, stored = recall(length), recall(length).replace(store="device")
    fine = hosted.replace(index_size=GROUP // 2)
    return {
        "dense": Dense(),
        **{f"window {share:.0%}": StreamingLLM(sink=SINKS, window=round(share * length) - SINKS) for share in SHARES},
        **{f"cca g={g}": pooled.replace(group_size=g) for g in (32, 16, 8)},
        "recall": hosted,
        "recall finer index": fine,
        "recall fewer open": fine.replace(num_recall=hosted.num_recall // 2, slots=hosted.slots // 2),
        "recall g=32": coarse(length),
        "recall drop": hosted.replace(unchosen="drop"),
        "recall drop, finer index": fine.replace(unchosen="drop"),
        "recall drop, more open": hosted.replace(unchosen="drop", num_recall=2 * hosted.num_recall),
        "quest": hosted.replace(index_bits=16, unchosen="drop"),
        "recall 8-bit store": stored.replace(store_bits=8),
        "recall 4-bit store": stored.replace(store_bits=4),
    }


def rounded_methods(length: int) -> dict[str, Method]:
    """Entries in 8 and 4 bits, by label."""
    given = {"group_size": GROUP, "window": WINDOW, "rep_bias": "log_size", "key_pooling": "mean"}
    hosted = {name: value for name, value in recall(length).to_dict().items() if name != "method"}
    rows: dict[str, Method] = {}
    for bits in (8, 4):
        rows[f"cca entries of {bits} bits"] = RoundedCCA(**given, value_pooling="mean", entry_bits=bits)
        rows[f"recall entries of {bits} bits"] = RoundedRecall(**hosted, entry_bits=bits)
    return rows


def calibrations(length: int, texts: int, seed: int, pooled: CCA = POOLED) -> Mapping[str, list[CalibrationConfig]]:
    """By where the tokens of recalling layers lie: one configuration per goal, the budget first."""
    entries = (pooled, pooled.replace(group_size=2 * GROUP))
    windows = tuple(StreamingLLM(sink=SINKS, window=w - SINKS) for w in (WINDOW, 2 * WINDOW))
    hosted = recall(length)
    dropping = hosted.replace(unchosen="drop", num_recall=2 * hosted.num_recall)
    candidates: Mapping[str, tuple[Method, ...]] = {
        "host": (Dense(), hosted, dropping, *entries, *windows),
        "device": (Dense(), hosted.replace(store="device", store_bits=4), *entries, *windows),
    }
    return {
        place: [
            CalibrationConfig(
                budget_nats=nats,
                cache=share,
                candidates=of,
                length=length,
                texts=texts,
                hidden_numbers=NUMBERS,
                seed=seed,
            )
            for nats, share in [(BUDGET, None), *((None, share) for share in GOALS[place])]
        ]
        for place, of in candidates.items()
    }
