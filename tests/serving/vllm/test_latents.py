"""What is refused of models with latents (MLA) in vLLM."""

import pytest
import torch
from small_models import condensed, random_latents
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.deepseek_v2 import DeepseekV2Attention
from vllm.platforms import current_platform

import condense
from condense.serving.vllm.latents import entry_widths

LCA = condense.LCA(group_size=4, window=24, rep_bias="log_size")
REFUSED = [
    ([0], {}, "all layers of a model with latents .* dense attention in layers 1"),
    (None, {"enable_lora": True}, "--enable-lora is not served with latents"),
]


@pytest.mark.parametrize(("layers", "settings", "words"), REFUSED, ids=["dense-layer", "lora"])
def test_what_is_refused(engine, tmp_path, layers, settings, words):
    """Before a weight is read."""
    model = condense.apply(condense.restore(random_latents()), LCA, layers)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        engine(tmp_path, **condensed(model), **settings)
    # what vLLM had set up until then, for engines that follow
    cleanup_dist_env_and_memory()


def a_module(cls, rope):
    """A module of vLLM's with latents, without weights."""
    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    module.kv_lora_rank, module.qk_rope_head_dim, module.rotary_emb = 32, 16, rope
    return module


def test_modules_that_hand_over_no_latents():
    """Those of DeepSeek's models with VLLM_MLA_DISABLE=1."""
    with pytest.raises(ValueError, match=r"DeepseekV2Attention expands its latents.* unset VLLM_MLA_DISABLE"):
        entry_widths(a_module(DeepseekV2Attention, None))


def test_a_rotation_that_is_wrong_on_a_cpu():
    """vLLM's kernel takes heads for tokens; once it does not, no model need be refused."""
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(16, 64, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, is_neox_style=False)
    wrapper = a_module(MultiHeadLatentAttentionWrapper, rope)
    if not current_platform.is_cpu():
        assert entry_widths(wrapper) == (32, 16)
        return
    q, k, positions = torch.randn(5, 2, 16), torch.randn(5, 1, 16), torch.arange(5)
    want, got = (f(positions, q.clone(), k.clone()) for f in (rope.forward_native, rope.forward_cpu))
    assert not torch.equal(got[0], want[0])
    with pytest.raises(ValueError, match="must be those of YaRN"):
        entry_widths(wrapper)
