"""vLLM's own model classes with condensed attention: built as stock models, then layer by layer replaced."""

from __future__ import annotations

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


for _stock, _module in ARCHITECTURES.items():
    _name = condensed_architecture(_stock)
    _class = getattr(importlib.import_module(f"vllm.model_executor.models.{_module}"), _stock)
    globals()[_name] = type(_name, (_Condensed, _class), {"__doc__": f"{_stock}, condensed.", "__module__": __name__})
