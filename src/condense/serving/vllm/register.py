"""The entry point that vLLM calls when it starts, in every process: it registers condensed architectures.

The configuration of a saved condensed model names such an architecture; vLLM without this plugin refuses it.
"""

from condense.architectures import condensed_architecture, read_as_written

# architectures that vLLM serves with its own code and that condense can condense -> vLLM's module
ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "GPT2LMHeadModel": "gpt2",
    "Gemma3ForCausalLM": "gemma3",
    "GemmaForCausalLM": "gemma",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MiniCPM3ForCausalLM": "minicpm3",
    "MistralForCausalLM": "mistral",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def condensed_name(architecture: str) -> str:
    """The name under which the condensed model is registered. Raises ValueError for an architecture not served."""
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture must be one of {', '.join(ARCHITECTURES)} to be served condensed, got {architecture}: use "
            "model.generate"
        )
    return condensed_architecture(architecture)


def register() -> None:
    """Register condensed architectures with vLLM, which calls this as entry point ``vllm.general_plugins``."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    read_as_written()
    for architecture in ARCHITECTURES:
        name = condensed_name(architecture)
        ModelRegistry.register_model(name, f"condense.serving.vllm.models:{name}")
        # settings that vLLM keeps by architecture, such as how answers are parsed
        if architecture in MODELS_CONFIG_MAP:
            MODELS_CONFIG_MAP[name] = MODELS_CONFIG_MAP[architecture]
