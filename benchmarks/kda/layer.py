"""KDA of the flash-linear-attention library: its operations, a plain recurrence, and its layer in a model.

Shapes: B rows, L tokens, H heads, D width of queries, keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# settings with which the library's own layer calls its operations
CALL: Mapping[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
    "state_v_first": True,
}


def recurrence(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
    """KDA token by token, in the dtype of its inputs (the paper's equation 1): what the library is held against.

    q, k, v: ``[B, L, H, D]``. f: what its decays come from, ``[B, L, H, D]``. b: before the sigmoid, ``[B, L, H]``.
    a_log: ``[H]``. bias: ``[H * D]``. Returns ``[B, L, H, D]``.
    """
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    decay = (-a_log.exp()[:, None] * F.softplus(f + bias.view_as(f[0, 0]))).exp()
    state, outputs = q.new_zeros(*q.shape[::2], q.shape[3], q.shape[3]), []  # [B, H, D, D]
    for t in range(q.shape[1]):
        state = decay[:, t, :, :, None] * state
        read = (k[:, t, :, None] @ state)[..., 0, :]
        written = b[:, t, :, None].sigmoid() * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * written[..., None, :]
        outputs.append((q[:, t, :, None] @ state)[..., 0, :] * q.shape[3] ** -0.5)
    return torch.stack(outputs, 1)


def random_inputs(L: int, H: int, D: int, *, seed: int = 0) -> list[Tensor]:
    """Arguments of `recurrence` for one row, on the GPU: bfloat16, the last two float32, drawn as the layer does."""
    generator = torch.Generator("cuda").manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device="cuda")
    q, k, v, f = (normal(1, L, H, D, dtype=torch.bfloat16) for _ in range(4))
    b = normal(1, L, H, dtype=torch.bfloat16)
    uniform = partial(torch.rand, generator=generator, device="cuda")
    step = torch.exp(uniform(H * D) * math.log(100) + math.log(0.001))
    return [q, k, v, f, b, (1 + 15 * uniform(H)).log(), step + torch.log(-torch.expm1(-step))]


def library(operation: Any, inputs: Sequence[Tensor], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The library's output ``[B, L, H, D]`` and its state after it."""
    q, k, v, f, b, a_log, bias = inputs
    found: tuple[Tensor, Tensor] = operation(
        q=q, k=k, v=v, g=f, beta=b, A_log=a_log, dt_bias=bias, initial_state=state, **CALL
    )
    return found


class KDA(nn.Module):
    """The library's layer in place of an attention of Hugging Face; projections of the same shape are taken over.

    Its convolutions begin by passing each token on as it is; decay, gates and norm are the layer's own, as it draws
    them. Without cache or padding.
    """

    def __init__(self, attention: nn.Module) -> None:
        from fla.layers import KimiDeltaAttention

        super().__init__()
        config: Any = attention.config
        self.layer = KimiDeltaAttention(
            config.hidden_size, head_dim=config.head_dim, num_heads=config.num_attention_heads,
            norm_eps=config.rms_norm_eps,
        )  # fmt: skip
        with torch.no_grad():
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                mine, theirs = getattr(self.layer, name).weight, getattr(attention, name).weight
                if mine.shape != theirs.shape:
                    raise ValueError(f"{name}: wanted as many KV heads as query heads, got {tuple(theirs.shape)}")
                mine.copy_(theirs)
            for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
                taps = getattr(self.layer, name).weight  # [channels, 1, taps], the last of them the token's own
                taps.zero_()[..., -1] = 1
            for parameter in self.layer.parameters():
                if parameter is not self.layer.A_log and parameter is not self.layer.dt_bias:
                    parameter.data = parameter.data.to(theirs.dtype)
        self.to(theirs.device)

    def forward(self, hidden_states: Tensor, **settings: Any) -> tuple[Tensor, None]:
        """``[B, L, width]`` of the whole text, mixed."""
        return self.layer(hidden_states)[0], None


def library_version() -> str:
    """Of flash-linear-attention."""
    return version("flash-linear-attention")
