"""Named settings: each stands for full settings of a method, and says for which resource they are.

A name is accepted wherever a method's is, also with settings changed: ``"recall-host:window=512"``. What a name stands
for may change between versions, so a model is saved with the settings and never with a name.
"""

from typing import Any, NamedTuple


class NamedSettings(NamedTuple):
    """Settings in `condense.Method.to_dict`'s form, the models and the resource that they are for, and what they lose.

    loses: the measured loss in words; empty if it depends on how the model was adapted.
    """

    settings: dict[str, Any]
    use: str
    loses: str = ""


_RECALL = {
    "method": "recall", "window": 256, "num_recall": 0.0625, "min_recall": 1024, "store_bits": 4,
    "prompt": "shared",
}  # fmt: skip
_LOSES = (
    "{} nats on text and 0.038 on copies (latents; others {}), and {} of a task (the worst of several trainings of "
    "models of 25 to 83M, texts of up to 32,768 tokens)"
)
NAMED_SETTINGS = {
    "recall-host": NamedSettings(
        _RECALL | {"store": "host", "num_recall": 512, "slots": 512},
        "Any model as it is; far tokens in host memory, so little is kept on the device.",
        _LOSES.format("0.015", "0.019", "1.2%"),
    ),
    "recall-device": NamedSettings(
        _RECALL,
        "Any model as it is; all on the device, far tokens in 4 bits.",
        _LOSES.format("0.008", "0.013", "1.0%"),
    ),
    "pooled": NamedSettings(
        {"method": "lca", "window": 512, "rep_bias": "log_size"},
        "A model adapted to it, also one with latents; the smallest cache, and nothing kept elsewhere.",
    ),
}


def full_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings ``{"method": name, ...}`` with a named setting replaced by the settings that it stands for."""
    named = NAMED_SETTINGS.get(str(settings.get("method")))
    return settings if named is None else named.settings | {k: v for k, v in settings.items() if k != "method"}
