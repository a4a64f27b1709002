"""A layer of vLLM with condensed attention, the pages that it asks for, and its backend, which reads tokens into them.

vLLM asks every layer of a model for one kind of cache. A condensed layer has up to three: the window is its own,
entries and ring are asked for by two more objects, which compute nothing.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheLayout,
    SlidingWindowSpec,
)

from condense.ops import Extras
from condense.ops.latents import Ranks, UpProjection
from condense.ops.paged import PagedSlots, PagedState, Pages, read_paged
from condense.serving.blocks import PageSizes, ServedLayer, page_sizes
from condense.serving.host import HostMemory
from condense.serving.trial import read_trials
from condense.serving.vllm.memory import available_bytes, rows_with_slots
from condense.serving.vllm.metadata import CondensedMetadata, CondensedMetadataBuilder


class CondensedBackend(AttentionBackend):
    """The backend that condensed layers name; vLLM never chooses it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        """vLLM's name for backends that are not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CondensedImpl]:
        """The class that computes a layer's attention."""
        return CondensedImpl

    @staticmethod
    def get_builder_cls() -> type[CondensedMetadataBuilder]:
        """The class that makes a step's metadata."""
        return CondensedMetadataBuilder

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """False, because `condense.serving.engine.check_engine` refuses KV transfers."""
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts with a page's bytes side by side; first the one whose blocks hold pages of different sizes.

        The second is for stock layers on a CPU, which do not know the first: then pages are padded to one size.
        """
        return (KVCacheLayout.BLHNC, KVCacheLayout.LBHNC)


class CondensedImpl(AttentionImpl[CondensedMetadata]):
    """One layer's attention over its pages."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args: Any, sinks: Tensor | None = None
    ) -> None:
        """sinks: a logit without a value for each head of this process; the tensor may be filled later."""
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.extras = Extras(sink_logits=sinks)
        self.kv_cache_dtype = "auto"

    def forward(
        self,
        layer: CondensedAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CondensedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of query ``[T, H, D]``, written to output; key and value ``[T, K, D]``; padding in the last rows.

        With latents widths are as in `condense.ops.paged.read_paged`.
        """
        qkv = query, key, value
        if attn_metadata is None:
            output.zero_()
            # without pages yet, vLLM measures the memory of a forward: compile all kernels now, so that none is later
            if query.is_cuda and kv_cache.numel() == 0:
                state_of = functools.partial(PagedState, up=layer.up, extras=self.extras, slots=layer.take_slots(query))
                read_trials(
                    qkv, layer.served, layer.model, layer.longest, scale=self.scale, out=output, state_of=state_of
                )
            return output
        assert attn_metadata.new is not None
        tables, dtype = get_forward_context().attn_metadata, layer.served.dtype
        pages = {kind: Pages(side.pages, tables[side.layer_name].table) for kind, side in layer.sides.items()}
        entries, ring = pages["entries"], pages.get("ring")
        if not layer.plan.has_records:
            entries = entries.view(dtype)
        window = Pages(kv_cache, attn_metadata.table).view(dtype)
        past, store = None if ring is None else ring.view(dtype), layer.sides["entries"].store
        of_layer = layer.up, self.extras, store, layer.slots, layer.longest, layer.ranks
        state = PagedState(window, entries, past, *of_layer)
        read_paged(qkv, state, attn_metadata.new, layer.plan.settings, scale=self.scale, out=output)
        return output


class CondensedAttention(Attention):
    """A layer that takes the place of a stock one, under its name, with the backend that reads and writes pages.

    up: the up-projections of a layer on latents; None for others. ranks, slots: as in `PagedState`. has_step: graphs
    may record single tokens.
    """

    up: UpProjection | None = None
    slots: PagedSlots | None = None
    ranks: Ranks | None = None

    def __init__(
        self,
        stock: Attention | MLAAttention,
        served: ServedLayer,
        host: HostMemory,
        vllm_config: VllmConfig,
        sinks: Tensor | None = None,
    ) -> None:
        """served: this layer. host: pages of all layers, dense ones included. sinks: as in `CondensedImpl`."""
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
        self.plan, self.served, self.model = served.plan, served, host.layers
        self.longest, self._engine = vllm_config.model_config.max_model_len, vllm_config
        sizes, context = page_sizes(self.model), vllm_config.compilation_config.static_forward_context
        self.has_step = served.has_step(vllm_config.device_config.device, self.longest)
        specs = page_specs(served, sizes)
        self.window_spec = specs.pop("window")
        self.sides = {
            kind: SideCache(f"{stock.layer_name}.{kind}", spec, served, host if kind == "entries" else None)
            for kind, spec in specs.items()
        }
        context.update({side.layer_name: side for side in self.sides.values()})

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """The kind of pages that hold the window."""
        return self.window_spec

    def take_slots(self, like: Tensor) -> PagedSlots | None:
        """The slots of a layer whose tokens lie in host memory, else None; made while vLLM measures a model's memory.

        The first layer that asks makes the slots of all layers, for as many requests in each: so every trial read is
        measured beside all slots and has the same room. like: a tensor of the tokens' dtype and device.
        """
        layers = self._engine.compilation_config.static_forward_context.values()
        missing = [x for x in layers if isinstance(x, CondensedAttention) and x.slots is None and x.served.copied_bytes]
        if missing:
            rows = rows_with_slots(self._engine, self.model)
            for x in missing:
                x.slots = PagedSlots.empty(rows, x.served.heads, x.served.widths, x.plan.settings, like)
        return self.slots


class SideCache(AttentionLayerBase):
    """An object that asks for the pages of a condensed layer's entries, or of its ring, and holds them.

    pages: empty until vLLM has measured its memory. store: as in `condense.ops.paged.PagedState`, made with the pages.
    """

    def __init__(self, layer_name: str, spec: AttentionSpec, served: ServedLayer, host: HostMemory | None) -> None:
        """served: the layer. host: the model's pages in host memory; None for pages without a part there."""
        self.layer_name, self.spec, self._served, self._host = layer_name, spec, served, host
        self.store: Tensor | None = None
        self.kv_cache = torch.tensor([])

    @property
    def kv_cache(self) -> Tensor:
        """The pages; on a CPU with their padding, because there vLLM zeroes new blocks through entries alone.

        Its own sliding layers would otherwise read the bytes that condensed layers left in a block as NaN.
        """
        if self.pages.is_cuda or self.pages.numel() == 0:
            return self.pages
        block = self.pages.stride(0)
        return self.pages.as_strided((len(self.pages), block - self.pages.storage_offset() % block), (block, 1))

    @kv_cache.setter
    def kv_cache(self, pages: Tensor) -> None:
        self.pages, self.store = pages, None
        if self._host is not None:
            self.store = self._host.pages_of(self._served, pages)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend of condensed layers, which makes the metadata of their pages too."""
        return CondensedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Pages of this kind; vLLM asks all ranks before it gives pages to any."""
        if self._host is not None:
            self._host.measure(available_bytes())
        return self.spec


def page_specs(served: ServedLayer, sizes: PageSizes) -> dict[str, AttentionSpec]:
    """The pages to ask for, by kind; all of bytes: vLLM would zero each block that it hands out if dtypes differed."""
    plan, (D, _) = served.plan, served.widths
    assert plan is not None
    page = {"num_kv_heads": served.heads, "head_size": D, "dtype": torch.uint8}
    specs: dict[str, AttentionSpec] = {
        "window": SlidingWindowSpec(
            block_size=sizes.near, state_content_bytes=served.window_bytes, sliding_window=plan.kept_tokens, **page
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
