"""Floating point operations of training steps, and the peak of the GPU that they are divided by.

L: tokens of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from condense.methods import Method
from condense.models import attention_layers
from condense.models.inspect import attention_flops
from condense.train.config import PhaseConfig

# FLOP/s of dense bfloat16 products by NVIDIA's data sheets, by CUDA's own names: slower boards of the same chip (PCIe,
# NVL) and parts of a GPU (MIG) have others
_PEAKS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
}


def device_peak() -> float | None:
    """Peak FLOP/s of the current GPU in dense bfloat16; None without a GPU, or for one that is not in the table."""
    return _PEAKS.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def step_flops(model: nn.Module, phase: PhaseConfig) -> dict[Method | None, int] | None:
    """FLOPs of one optimizer step, over all processes, by the attention of the step (None: dense).

    By the usual rule of 6 N per token and attention beside it (Kaplan et al. 2020; PaLM, appendix B), where a product
    is 2 FLOPs per weight and token and the backward pass has two products for each one of the forward pass:

    - weights: 6 per trained weight and token, 4 per frozen one, whose own gradient is not computed. Weights that are
      only looked up (embeddings) and vectors (norms, biases) are not counted.
    - attention: three times that of a forward pass, as `condense.models.inspect` counts it: causal, so about half of
      ``L * L`` in a dense step; in a condensed step the window, the entries, and how they are made.
    - distillation: the teacher's forward pass, which is dense.

    Nothing is counted twice: neither scores nor activations that the backward pass computes again.

    model: before accelerate wraps it, its trained weights marked by ``requires_grad``; or PEFT around one.
    Returns None for a model with weights that not every token goes through (a mixture of experts, a vision tower), and
    for one whose attention is not known.
    """
    try:
        attention_layers(model)
    except ValueError:
        return None
    causal_lm: Any = model
    output = causal_lm.get_output_embeddings().weight
    per_token, seen = 0, set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            looked_up = isinstance(module, nn.Embedding) and parameter is not output
            if looked_up or parameter.dim() < 2 or id(parameter) in seen:
                continue
            if parameter.dim() > 2 and not isinstance(module, nn.Conv1d):
                return None  # experts, a tensor for all of a layer, or a vision tower's patches
            seen.add(id(parameter))
            per_token += (6 if parameter.requires_grad else 4) * parameter.numel()
            # adapters, which alone are trained where there are any, are off in the teacher
            taught = phase.distill > 0 and not (hasattr(model, "disable_adapter") and parameter.requires_grad)
            per_token += 2 * parameter.numel() * taught
    L = phase.sequence_length
    teacher = attention_flops(model, None, L) if phase.distill else 0
    methods = {phase.attention_at(step) for step in range(phase.steps)}
    return {
        method: phase.batch_size * (per_token * L + 3 * attention_flops(model, method, L) + teacher)
        for method in methods
    }
