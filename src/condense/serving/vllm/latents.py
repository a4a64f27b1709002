"""A layer of vLLM with condensed attention on latents (MLA), and MiniCPM3's attention with such a layer.

vLLM's models of DeepSeek's kind hand queries, latents and rope keys to a layer of their own, whose place a condensed
one takes. MiniCPM3's expands latents before its layer sees them; with a condensed one it does not.

Shapes: T new tokens, H heads of this process; widths d_c of latents, d_n, d_r and d_v of a head's parts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.minicpm3 import MiniCPM3Attention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name

from condense.ops.latents import Ranks, UpProjection
from condense.serving.blocks import ServedLayer
from condense.serving.host import HostMemory
from condense.serving.vllm.backend import CondensedAttention


class CondensedLatents(CondensedAttention):
    """A layer that takes the place of a stock one on latents, under its name."""

    def __init__(
        self,
        stock: Attention | MLAAttention,
        module: Any,
        served: ServedLayer,
        host: HostMemory,
        vllm_config: VllmConfig,
    ) -> None:
        """module: the module that holds ``stock`` and the up-projections. Others as in `CondensedAttention`."""
        super().__init__(stock, served, host, vllm_config)
        ranks = vllm_config.parallel_config.tensor_parallel_size
        if ranks > 1:
            self.ranks = Ranks(ranks * self.num_heads, tensor_model_parallel_all_reduce, _largest)
        self.kv_b_proj, self.widths = module.kv_b_proj, (module.qk_nope_head_dim, module.v_head_dim)
        # on a CPU vLLM would pack the matrix in a form that none but its own product reads
        self.kv_b_proj._cpu_skip_gemm_dispatch = True
        # vLLM 0.30's name for the same switch, for matrices that are not quantised
        self.kv_b_proj.skip_weight_relayout = True
        # DeepSeek-V3's kind splits pairs of rope channels in transformers; an index depends on the order of channels
        self.splits_pairs = getattr(vllm_config.model_config.hf_text_config, "rope_interleave", False)
        if isinstance(module, MiniCPM3Attention):
            module.__class__ = CondensedMiniCPM3Attention

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the up-projections, whatever they are quantised to, as matrices of this dtype."""
        super().process_weights_after_loading(act_dtype)
        weight = get_and_maybe_dequant_weights(self.kv_b_proj, out_dtype=act_dtype)
        w_uk, w_uv = weight.unflatten(0, (self.num_heads, sum(self.widths))).split(self.widths, dim=1)
        self.up = UpProjection(w_uk.mT, w_uv.mT)

    def forward(self, query: Tensor, c: Tensor, k_rope: Tensor, **_: Any) -> Tensor:
        """Attention ``[T, H * d_v]`` of query ``[T, H, d_n + d_r]``, c ``[T, d_c]`` and k_rope ``[T, 1, d_r]``.

        c after its norm, rope parts rotated. Other arguments of vLLM's own layer say nothing new and are not read.
        """
        if self.splits_pairs:
            # the first channels of all pairs, then the second ones
            q_nope, q_rope = query.split([self.widths[0], k_rope.shape[-1]], dim=-1)
            q_rope, k_rope = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q_rope, k_rope))
            query = torch.cat([q_nope, q_rope], dim=-1)
        key = torch.cat([c[:, None], k_rope], dim=-1)
        out = query.new_empty(*query.shape[:2], self.widths[1])
        name = _encode_layer_name(self.layer_name)
        torch.ops.vllm.unified_attention_with_output(query, key, key[..., :0], out, name)
        return out.flatten(1)


class CondensedMiniCPM3Attention(MiniCPM3Attention):
    """The stock attention module, but for latents: they go to its layer as they are."""

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the module's output ``[T, hidden]``, as the stock one does."""
        H, d_n, d_r = self.num_local_heads, self.qk_nope_head_dim, self.qk_rope_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)[0]))[0].view(-1, H, self.qk_head_dim)
        c, k_rope = self.kv_a_proj_with_mqa(hidden_states)[0].split([self.kv_lora_rank, d_r], dim=-1)
        # rope embeddings take the heads of a token side by side
        q_rope, k_rope = self.rotary_emb(positions, q[..., d_n:].reshape(-1, H * d_r), k_rope.contiguous())
        q = torch.cat([q[..., :d_n], q_rope.view(-1, H, d_r)], dim=-1)
        return self.o_proj(self.attn(q, self.kv_a_layernorm(c), k_rope[:, None]))[0]


def _largest(x: Tensor) -> Tensor:
    """The maximum of each number over all ranks, from a gather of all, because vLLM reduces by sums alone."""
    return tensor_model_parallel_all_gather(x[None], 0).amax(0)


def entry_widths(module: nn.Module) -> tuple[int, int] | None:
    """Widths d_c and d_r of what is cached per token by a module on latents, the part of a model that has the layer.

    None for other modules. Raises ValueError for one that hands its layer no latents, or wrong ones.
    """
    latent_width: Any = getattr(module, "kv_lora_rank", None)
    if latent_width is None:
        return None
    if not isinstance(module, MultiHeadLatentAttentionWrapper | MiniCPM3Attention):
        raise ValueError(
            f"{type(module).__name__} expands its latents, and cannot be condensed: unset VLLM_MLA_DISABLE, with which "
            "vLLM keeps keys and values of heads"
        )
    # MiniCPM3's module calls the rotation kernel in another way, without the fault that is refused here
    is_plain = not isinstance(module, MiniCPM3Attention) and isinstance(module.rotary_emb, RotaryEmbedding)
    if is_plain and current_platform.is_cpu():
        raise ValueError(
            "rope_parameters must be those of YaRN for a model with latents (MLA) on a CPU, where vLLM takes heads for "
            "tokens as it rotates queries, dense too: use a GPU or model.generate"
        )
    return latent_width, module.qk_rope_head_dim
