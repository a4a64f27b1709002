"""Condensed attention in transformers' models, without copying their forwards.

A condensed layer is a subclass of its stock attention class. Its forward calls the stock forward with a `CacheProxy` in
place of the cache, and passes the proxy on, as a keyword argument, to the attention function. The stock forward
projects and rotates, gives new keys and values to the proxy and calls `condense_attention`, which reads the real cache.

Shapes: B rows, H query heads, K KV heads, L new tokens, S keys in the cache, D and Dv widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, StaticCache

from condense.caches import CACHE, CondensedLayer, Expected, StaticCondensedLayer
from condense.caches.store import join_writes
from condense.methods import Method
from condense.methods.checks import attend_checked
from condense.models.families import FAMILIES, REGISTERED, is_latent, stock_class
from condense.models.forward import (
    AttentionCall,
    ForwardBoard,
    assert_one_document,
    refuse_context_parallel,
    refuse_options,
)
from condense.models.layers import condensed_layer, ensure_layers, read_tokens
from condense.models.masks import ALL_REAL, is_real
from condense.models.mla import condensed_latents, head_mesh, up_projection
from condense.models.reread import Pieces
from condense.models.stock import method_of
from condense.ops import Extras, NewToken
from condense.ops.tensors.autocast import outside_autocast

IMPLEMENTATION = "condense"
KEY = "condense"  # attribute of a configuration that holds the methods of its layers
_PROMPT_NOT_COMPILED = (
    "a prompt is read into a condensed cache with counts on the host, unless generate knows that it has no padding and "
    "reads it at once into a new static cache; compile single steps instead: "
    "generate(cache_implementation='static', compile_config=CompileConfig()) or condense.GraphDecoder(compile=True)"
)


def is_condensed(model: Any) -> bool:
    """True if the configuration of the model's text part names `condense`; a multimodal model names it there alone."""
    return bool(model.config.get_text_config(decoder=True)._attn_implementation == IMPLEMENTATION)


def condense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    condense_state: CacheProxy | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function registered as `condense`.

    query ``[B, H, L, D]``, key ``[B, K, S, D]``, value ``[B, K, S, Dv]``; attention_mask as
    `condense.models.masks.condense_mask` returns it; softcap, s_aux: soft cap and sink logits as in
    `condense.ops.Extras`, or None. Returns ``[B, L, H, Dv]`` and no weights.
    Raises ValueError if the model was not prepared by `condense.apply`, for a bias by position, for soft caps and sinks
    over latents, for a sliding window in a condensed layer, for output_attentions and for is_causal=False.
    """
    if condense_state is None:
        raise ValueError(
            "attn_implementation='condense' works through condense.apply(model, method): call that instead. If this "
            "model was built from the configuration of a condensed one, give it a copy: copy.deepcopy(config)"
        )
    refuse_options(module, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with outside_autocast(query, key, value) as (q, k, v):
        extras, where = Extras(softcap or 0.0, s_aux), (condense_state.cache, condense_state.layer_idx)
        call = AttentionCall(module, q, k, v, attention_mask, scale, dropout, kwargs, extras, *where)
        out = condense_state.attend(call)
    return out.transpose(1, 2).contiguous(), None  # contiguous as from stock functions, because some forwards view it


class CacheProxy:
    """The object in place of the cache in a stock forward: returns new keys and values unchanged and stores nothing."""

    def __init__(self, cache: Cache | None, layer_idx: int, *, is_latent: bool) -> None:
        self.cache = cache
        self.layer_idx = layer_idx
        self.is_latent = is_latent
        self.latents: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values alone, in place of ``Cache.update``, and store nothing in the cache.

        MLA calls it with latents and rope keys, together ``[B, 1, L, d_c + d_r]``. They are kept here for `attend`.
        """
        self.layer_idx = layer_idx
        self.latents = torch.cat([key_states, value_states], dim=-1) if self.is_latent else None
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Tensor | int:
        """Slots in the layer's cache, 0 without one; the prompt's if it is read again. Llama 4 scales queries by it."""
        if isinstance(self.cache, Pieces) and layer_idx in self.cache.held:
            return self.cache.behind
        return 0 if self.cache is None else self.cache.get_seq_length(layer_idx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["cache"], name)

    def attend(self, call: AttentionCall) -> Tensor:
        """Condensed attention ``[B, H, L, Dv]`` of the new tokens, which are added to the real cache.

        Tokens of a prompt that is read again are not added (`condense.models.reread.Pieces`).
        """
        if self.is_latent and (call.extras.softcap or call.extras.sink_logits is not None):
            raise ValueError("attention over latents (MLA) has no soft cap and no sinks: call condense.restore(model)")
        method = method_of(call.module)
        method.check_attention(scale=call.scale, dropout_p=call.dropout, extras=call.extras)
        cache = call.cache
        if isinstance(cache, Pieces) and call.layer_idx in cache.held:
            return cache.attend(call)
        if cache is not None and call.q.shape[2] == 1:
            out = self._step(call, cache, method)
            if out is not None:
                return out
        if cache is None or _is_plain_prompt(call):
            return self._read(call)
        return self._read_eagerly(call)

    def _step(self, call: AttentionCall, cache: Cache, method: Method) -> Tensor | None:
        """Add one token per row to the layer of the cache in place, and attend; None if that cannot be done."""
        module, q, k, v = call.module, call.q, call.k, call.v
        with_gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if with_gradients or call.dropout != 0 or call.options.get("cu_seq_lens_q") is not None:
            return None
        layer = condensed_layer(cache, call.layer_idx, method)
        if layer.is_sliding and not layer.is_initialized:
            # on the first forward the stock layer sized a sliding layer's mask: it covers the window only
            return None
        latent_width: int | None = None
        if self.latents is not None:
            latent_width, k = module.kv_lora_rank, self.latents.to(q.dtype)
            v = k[..., :0]
        # an offloading cache moves layers back to the GPU in `update`, which a step does not call
        if cache.offloading or not layer.can_step(k, v):
            return None
        if latent_width is not None and head_mesh(module, q.shape[1]) is not None:
            # a step would average queries over this rank's heads only
            if isinstance(layer, CondensedLayer):
                return None
            raise ValueError("static caches of latents cannot be tensor parallel: leave cache_implementation unset")
        real = None if call.mask is None or ALL_REAL in call.options else _real_rows(call, call.mask, layer)
        up = None if latent_width is None else up_projection(module, q.shape[1], q)
        q = q if up is None else up.absorb(q)
        out = layer.step(NewToken(q, k, v, real), scale=call.scale, latent_width=latent_width, extras=call.extras)
        if module.condense_watch is not None:
            module.condense_watch(q, real, layer, call.scale)
        return out if up is None else up.project_out(out)

    def _read(self, call: AttentionCall) -> Tensor:
        refuse_context_parallel()
        tensors: tuple[Tensor, ...] = (call.q, call.k, call.v)
        if self.latents is not None:
            tensors += (self.latents.to(call.q.dtype),)
        condensed = _condensed if self.latents is None else condensed_latents
        forward, method = call.module.condense_board.forward_of(call), method_of(call.module)
        layer = None if call.cache is None else condensed_layer(call.cache, call.layer_idx, method)
        seen = 0 if layer is None else layer.count_slots()
        forward.check_slots(seen)
        all_real = ALL_REAL in call.options or _is_plain_prompt(call)
        if torch.compiler.is_compiling() and not all_real:
            assert_one_document(call)
            all_real = True
        # in training an empty cache counts as no cache: transformers makes one by default, and nothing reads it
        is_cached = layer is not None and (seen > 0 or not call.module.training)
        documents = forward.documents(plain=not is_cached and call.mask is None and not all_real)
        if documents is not None:
            if is_cached:
                raise ValueError("packed documents (cu_seq_lens_q) cannot be cached: pass use_cache=False")
            no_cache = call._replace(cache=None)
            if method.reads_packed:
                return condensed(no_cache._replace(plan=forward.plan(None, documents)), *tensors)
            parts = zip(*(x.split(documents, dim=2) for x in tensors), strict=True)
            return torch.cat([condensed(no_cache, *part) for part in parts], dim=2)
        start = None if all_real else seen
        padding = None if start is None else forward.padding(start)
        if layer is not None and start and method.layout.lookahead is None:
            forward.check_past(start, layer.count_tokens)
        aligned = tensors if padding is None else tuple(map(padding.align, tensors))
        out = condensed(call._replace(padding=padding, plan=forward.plan(start)), *aligned)
        if layer is not None:
            join_writes(layer.buffers)
        return out if padding is None else padding.restore(out)

    # `_read` outside of compiled graphs, because it counts tokens on the host
    _read_eagerly = torch.compiler.disable(_read, reason=_PROMPT_NOT_COMPILED)


def _is_plain_prompt(call: AttentionCall) -> bool:
    """True if the call reads a prompt, known to have no padding, into an empty static layer."""
    layer = call.cache.layers[call.layer_idx] if isinstance(call.cache, StaticCache) else None
    return isinstance(layer, StaticCondensedLayer) and layer.expected is Expected.PLAIN_PROMPT


def _real_rows(call: AttentionCall, mask: Tensor, layer: CondensedLayer | StaticCondensedLayer) -> Tensor | None:
    """Nonzero in rows whose new token is real, ``[B]``; None if all are. On the device for static layers, else CPU."""
    if isinstance(layer, StaticCondensedLayer) and torch.compiler.is_compiling():
        return is_real(mask, layer.num_slots, layer.max_cache_len, call.q.shape[0])
    forward = call.module.condense_board.forward_of(call)
    if isinstance(layer, StaticCondensedLayer):
        slots, num_slots = layer.num_slots, layer.max_cache_len
        return forward.once(("real", num_slots), lambda: is_real(mask, slots, num_slots, forward.B))
    padding = forward.padding(layer.get_seq_length())
    return None if padding is None else padding.counts


def _condensed(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention ``[B, H, L, Dv]`` of new right-aligned tokens to themselves and to the tokens in the cache."""
    method = method_of(call.module)
    context = read_tokens(call, method, q, k, v)
    return attend_checked(method, q, context, scale=call.scale, dropout_p=call.dropout, extras=call.extras)[0]


class CondensedAttention(nn.Module):
    """Mixin in front of a stock attention class.

    condense_method: the layer's method; None for a layer that stays stock, and attends by condense_stock, a method that
    computes the same. condense_previous: the attention implementation that `condense.restore` returns to.
    condense_board: the `ForwardBoard` of all layers. condense_watch: called after each step, see
    `condense.models.watch`; None for nothing.
    """

    condense_method: Method | None
    condense_stock: Method
    condense_previous: str
    condense_board: ForwardBoard
    condense_watch: Any = None
    # set by MLA's stock classes; declared here because `is_latent` reads it in every layer and step, and where it is
    # missing nn.Module would search all parameters for it
    kv_lora_rank: int | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stock forward with the proxy as its cache, and the proxy as an argument for `condense_attention`."""
        # attention classes of other repositories may call the argument by its older name
        older = "layer_past" if "layer_past" in kwargs else "past_key_values"
        name = older if older in kwargs else CACHE
        cache: Cache | None = kwargs.get(name)
        if not isinstance(cache, Cache | None) or (name != "cache" and kwargs.get("cache") is not None):
            raise ValueError(
                "paged caches and continuous batching cannot be condensed: call condense.restore(model), or use "
                "model.generate"
            )
        # reading an attribute of a configuration takes some 10 us; the property _attn_implementation would read two
        config: Any = self.config
        if config._attn_implementation_internal != IMPLEMENTATION:
            # another implementation was set after condense.apply: use that one
            return super().forward(*args, **kwargs)
        layer_idx: int = self.layer_idx  # type: ignore[assignment]
        if not torch.compiler.is_compiling():
            self.condense_board.check_thread()
            methods = self.condense_board.methods
            if cache is not None and layer_idx == next(iter(methods)) and not isinstance(cache, Pieces):
                # a wrong cache raises before any layer has stored a token
                ensure_layers(cache, methods)
        state = CacheProxy(cache, layer_idx, is_latent=is_latent(self))
        return super().forward(*args, **kwargs | {name: state, "condense_state": state})


def condensed_class(stock: type[nn.Module]) -> type[nn.Module]:
    """The condensed subclass of a stock attention class, made once and stored in this module, where pickle finds it."""
    name = f"Condensed{stock.__name__}"
    if stock in REGISTERED:  # a registered class may have the name of a known one
        name = f"{name}_{stock.__module__.replace('.', '_')}"
    if name not in globals() or globals()[name].__mro__[2] is not stock:
        globals()[name] = type(name, (CondensedAttention, stock), {"__module__": __name__, "__doc__": stock.__doc__})
    return globals()[name]


def __getattr__(name: str) -> type[nn.Module]:
    """Make a condensed subclass when pickle asks for one that this process has not made yet."""
    stock = name.removeprefix("Condensed")
    if stock == name or stock not in FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return condensed_class(stock_class(stock))
