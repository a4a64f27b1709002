"""A layer of vLLM with condensed attention, and the pages that it asks for.

vLLM asks every layer of a model for one kind of cache. A condensed layer has up to three: the window is its own,
entries and ring are asked for by two more objects, which compute nothing.
"""

from collections.abc import Sequence

from torch import Tensor, tensor, uint8
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, FullAttentionSpec, SlidingWindowSpec

from condense.ops.latents import UpProjection
from condense.serving.blocks import PageSizes, ServedLayer, page_sizes
from condense.serving.vllm.backend import CondensedBackend


class CondensedAttention(Attention):
    """A layer that takes the place of a stock one, under its name, with the backend that reads and writes pages.

    up: the up-projections of a layer on latents (`condense.serving.vllm.latents`); None for other layers. has_step:
    graphs may record single tokens.
    """

    up: UpProjection | None = None

    def __init__(
        self,
        stock: Attention | MLAAttention,
        served: ServedLayer,
        model: Sequence[ServedLayer],
        vllm_config: VllmConfig,
        sinks: Tensor | None = None,
    ) -> None:
        """served: this layer; model: all layers, dense ones too. sinks: as in `CondensedImpl`."""
        super().__init__(
            stock.num_heads,
            stock.head_size,
            stock.impl.scale,
            num_kv_heads=stock.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=stock.quant_config,
            prefix=stock.layer_name,
            attn_backend=CondensedBackend,
            sinks=sinks,
        )
        assert served.plan is not None
        self.plan, self.served, self.model = served.plan, served, model
        self.longest = vllm_config.model_config.max_model_len
        sizes = page_sizes(model)
        self.has_step = served.has_step(vllm_config.device_config.device, self.longest, sizes.far)
        specs = page_specs(served, sizes)
        self.window_spec = specs.pop("window")
        self.sides = {kind: SideCache(f"{stock.layer_name}.{kind}", spec) for kind, spec in specs.items()}
        context = vllm_config.compilation_config.static_forward_context
        context.update({side.layer_name: side for side in self.sides.values()})

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Pages of the window."""
        return self.window_spec


class SideCache(AttentionLayerBase):
    """An object that asks for the pages of a condensed layer's entries, or of its ring, and holds them."""

    def __init__(self, layer_name: str, spec: AttentionSpec) -> None:
        self.layer_name, self.spec = layer_name, spec
        self.kv_cache: Tensor = tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend of condensed layers, which makes the metadata of their pages too."""
        return CondensedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Pages of this kind."""
        return self.spec


def page_specs(served: ServedLayer, sizes: PageSizes) -> dict[str, AttentionSpec]:
    """The pages to ask for, by kind; all of bytes: vLLM would zero each block that it hands out if dtypes differed."""
    plan, (D, _) = served.plan, served.widths
    assert plan is not None
    page = {"num_kv_heads": served.heads, "head_size": D, "dtype": uint8}
    specs: dict[str, AttentionSpec] = {
        "window": SlidingWindowSpec(
            block_size=sizes.near, state_content_bytes=served.token_bytes, sliding_window=plan.kept_tokens, **page
        ),
        "entries": FullAttentionSpec(
            block_size=sizes.far,
            state_content_bytes=served.slot_bytes,
            tokens_per_state=sizes.far // plan.entry_slots(sizes.far),
            **page,
        ),
    }
    if plan.ring_slots:
        means = {"block_size": plan.ring_slots, "state_content_bytes": D * served.dtype.itemsize}
        specs["ring"] = CircularBufferSpec(**means, **page)
    return specs
