"""What vLLM calls when it starts, in every process: condensed models under names of their own.

A saved condensed model names its stock architecture. vLLM without this plugin would serve it densely under that name,
so a condensed model is asked for by another, which `condense serve` fills in; without the plugin that is an error.
"""

from __future__ import annotations

# architectures that vLLM serves with its own code and condense can condense
ARCHITECTURES = (
    "GPT2LMHeadModel",
    "GemmaForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "OPTForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def condensed_name(architecture: str) -> str:
    """The name under which the condensed model is registered. Raises ValueError for an architecture not served."""
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture must be one of {', '.join(ARCHITECTURES)} to be served condensed, got {architecture}: use "
            "model.generate"
        )
    return f"Condensed{architecture}"


def register() -> None:
    """Entry point ``vllm.general_plugins``."""
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES:
        name = condensed_name(architecture)
        ModelRegistry.register_model(name, f"condense.serving.vllm.models:{name}")
