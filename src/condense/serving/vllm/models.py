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

from condense.serving.vllm.layer import condense_layers


class _Condensed:
    """Mixin before a stock class: once the model is built, condenses the layers that ``config.condense`` names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]
        condense_layers(self, vllm_config)  # type: ignore[arg-type]


class CondensedGPT2LMHeadModel(_Condensed, GPT2LMHeadModel):
    """GPT-2, condensed."""


class CondensedGemmaForCausalLM(_Condensed, GemmaForCausalLM):
    """Gemma, condensed."""


class CondensedLlamaForCausalLM(_Condensed, LlamaForCausalLM):
    """Llama, condensed."""


class CondensedMistralForCausalLM(_Condensed, MistralForCausalLM):
    """Mistral without a sliding window, condensed."""


class CondensedOPTForCausalLM(_Condensed, OPTForCausalLM):
    """OPT, condensed."""


class CondensedPhi3ForCausalLM(_Condensed, Phi3ForCausalLM):
    """Phi-3, condensed."""


class CondensedQwen2ForCausalLM(_Condensed, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5, condensed."""


class CondensedQwen3ForCausalLM(_Condensed, Qwen3ForCausalLM):
    """Qwen3, condensed."""
