"""vLLM's own model classes with condensed attention: built as stock models, then layer by layer replaced."""

import importlib
from typing import Any

from vllm.config import VllmConfig

from condense.architectures import condensed_architecture
from condense.serving.vllm.register import ARCHITECTURES
from condense.serving.vllm.replace import condense_layers


class _Condensed:
    """Mixin before a stock class: once the model is built, condenses the layers that ``config.condense`` names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]
        condense_layers(self, vllm_config)  # type: ignore[arg-type]


def __getattr__(name: str) -> type:
    """The condensed class of that name; made, and vLLM's module of its stock class imported, when it is asked for."""
    stock = next((each for each in ARCHITECTURES if condensed_architecture(each) == name), None)
    if stock is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(importlib.import_module(f"vllm.model_executor.models.{ARCHITECTURES[stock]}"), stock)
    made = type(name, (_Condensed, base), {"__doc__": f"{stock}, condensed.", "__module__": __name__})
    return globals().setdefault(name, made)
