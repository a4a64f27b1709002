"""vLLM's own model classes with condensed attention: built as stock models, then layer by layer replaced."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.gemma import GemmaForCausalLM
from vllm.model_executor.models.gpt2 import GPT2LMHeadModel
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.opt import OPTForCausalLM
from vllm.model_executor.models.phi3 import Phi3ForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from condense.architectures import condensed_architecture
from condense.serving.vllm.layer import condense_layers


class _Condensed:
    """Mixin before a stock class: once the model is built, condenses the layers that ``config.condense`` names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]
        condense_layers(self, vllm_config)  # type: ignore[arg-type]


for _stock in (
    GPT2LMHeadModel,
    GemmaForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    OPTForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
):
    _name = condensed_architecture(_stock.__name__)
    globals()[_name] = type(
        _name, (_Condensed, _stock), {"__doc__": f"{_stock.__name__}, condensed.", "__module__": __name__}
    )
