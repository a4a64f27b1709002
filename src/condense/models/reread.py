"""Reading prompts again, by `condense.Method.reread`: a hook of the decoder, and the cache of the pieces.

The first reading is an ordinary forward, after which each layer's cache holds the whole prompt. The hook then calls the
decoder on pieces of the prompt, several at once as rows of a batch, over a cache of their own: there, layers that drop
tokens read the prompt's keys and values from their first cache and note the attention weights that these get; all other
layers begin anew with each piece.

Shapes: B rows, L slots of the prompt, P pieces of c tokens read at once, S keys, K KV heads.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import Cache, DynamicCache, PreTrainedModel

from condense.caches import CACHE, CondensedCacheLayer
from condense.methods import Method, Reread
from condense.models.families import COUNT_TOKENS, OWN_CACHE, is_latent, last_positions
from condense.models.forward import AttentionCall
from condense.models.mla import hook_arguments, up_projection
from condense.ops import RuleSpans, Source, UniformRule, attend, largest_weights

_HOOK = "condense_rereading"
# arguments of a decoder's forward that are split with the prompt, ``[B, L, ...]``
_INPUTS = ("input_ids", "inputs_embeds", "per_layer_inputs", "token_type_ids")
# further tensors that a forward may be given; pieces get positions, masks and caches of their own instead
_OWN = {"attention_mask", "position_ids", "cache_position", "position_embeddings"}
# most tokens, of all rows together, that are read again at once, or one piece of each row: fewer leave a GPU waiting
# for the host; on a CPU more take memory and save no time
_MOST_TOKENS = {"cpu": 1}
_MOST_ELSEWHERE = 16_384
# most rows of pieces in a batch: kernels take 65,535 rows times KV heads at most, and latents expand to 128 heads
_MOST_ROWS = 128
_CAUSAL = UniformRule(chunk=1, window=None, max_chunks=0)


def check_readings(attentions: Mapping[int, nn.Module], methods: Mapping[int, Method]) -> None:
    """Raise ValueError if the methods of a model's layers differ in `condense.Method.reread`, or if one drops tokens
    in a model that takes no cache but its own, as pieces need one.
    """
    config: Any = next(iter(attentions.values())).config
    for method in methods.values():
        if config.model_type in OWN_CACHE and method.reread is not None and method.reread.share < 1:
            raise ValueError(
                f"method: {config.model_type} takes no cache but its own, so it cannot read pieces of a prompt again, "
                f"got {type(method).__name__}: use Recall with keep=1, which keeps all tokens"
            )
    if len({method.reread for method in methods.values()} - {None}) > 1:
        raise ValueError(
            "a second reading ranks the tokens of all layers together: wanted one setting of Reread, or one keep and "
            f"window of Recall, got {', '.join(sorted({str(method) for method in methods.values()}))}"
        )


def watch(model: nn.Module, attentions: Mapping[int, nn.Module], methods: Mapping[int, Method]) -> None:
    """Hook the decoder in ``model`` to read prompts again if a method of its layers needs it; else remove the hook.

    Raises ValueError as `check_readings`, and changes nothing then.
    """
    check_readings(attentions, methods)
    for module in model.modules():
        if (hook := vars(module).pop(_HOOK, None)) is not None:
            hook.remove()
    if any(method.reread is not None for method in methods.values()):
        layers = set(attentions.values())
        # the innermost model that holds all layers: it has no head, whose logits of the pieces nobody needs
        holders = [m for m in model.modules() if isinstance(m, PreTrainedModel) and layers <= {*m.modules()}]
        vars(holders[-1])[_HOOK] = holders[-1].register_forward_hook(_read_again, with_kwargs=True)


class Pieces(DynamicCache):
    """The cache, of B * P rows, while P pieces of c tokens of each row's prompt are read again. size: (P, c).

    held: for each layer under ``method`` the keys and values of the whole prompt, ``[B, K, L, D]``, left-aligned.
    scores: for each of these layers ``[B, K, L]``, set to the largest weight that a query of a token's own piece gives
    it; so sinks, which stay in any case, are scored by the first piece alone. tokens: real ones per row, int64 CPU
    ``[B]``. start: the first token of the first piece. behind: slots of the prompt, padding included.
    """

    def __init__(
        self, config: Any, method: Reread, held: Mapping[int, tuple[Tensor, ...]], scores: Mapping[int, Tensor],
        tokens: Tensor, start: int, size: tuple[int, int], behind: int,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        self.held, self._scores, self._start, (self._P, self._c), self.behind = held, scores, start, size, behind
        begins = start + self._c * torch.arange(self._P, device="cpu")
        sinks = begins.clamp(max=method.sink)
        real = (tokens[:, None] - begins).clamp(0, self._c)  # [B, P]
        # columns of a piece: its tokens, then the sinks, then any tokens to fill up, which no query sees
        column = torch.arange(self._c + int(sinks.max()), device="cpu")
        inside = column < real[..., None]
        columns = torch.where(
            inside, begins[:, None] + column, (column - real[..., None]).clamp(0, int(tokens.max()) - 1)
        )
        self._seen = (real + sinks).flatten()
        self._on_cpu = torch.arange(len(tokens), device="cpu")[:, None, None], columns, ~inside[..., : self._c]
        self._copies: dict[torch.device, list[Tensor]] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention ``[B * P, H, c, Dv]`` of pieces: to the piece in the first cache, the sinks, and itself, causally.

        Raises ValueError for heads that are spread over processes.
        """
        q, heads = call.q, call.module.config.num_attention_heads
        if q.shape[1] != heads:
            raise ValueError(
                f"reread cannot be tensor parallel: its choice is for all heads, and {q.shape[1]} of {heads} are here"
            )
        rows, columns, padding = self._on(q.device)
        # tokens of a piece are copied once, token by token: kernels read these strides without another copy
        k, v = (x.transpose(1, 2)[rows, columns].flatten(0, 1).transpose(1, 2) for x in self.held[call.layer_idx])
        if is_latent(call.module):
            k, v = up_projection(call.module, heads, q).expand(k)
        spans = RuleSpans(_CAUSAL, 0, 0, 0, self._seen)
        sources = (Source(k, v), Source(call.k, call.v))
        out, lse = attend(q, sources, spans, scale=call.scale, return_lse=True, extras=call.extras)
        assert lse is not None
        if (logits := call.extras.sink_logits) is not None:
            lse = torch.logaddexp(lse, logits.to(lse.dtype)[:, None])
        lse = lse.masked_fill(padding.flatten(0, 1)[:, None], torch.inf)
        best = largest_weights(q, k[:, :, : self._c], lse, scale=call.scale, softcap=call.extras.softcap)
        scores = self._scores[call.layer_idx][:, :, self._start :]
        # latents are one KV head, which was expanded to a key for each query head
        best = best.unflatten(1, (scores.shape[1], -1)).amax(2).unflatten(0, (-1, self._P))  # [B, P, K, c]
        stop = min(scores.shape[2], self._P * self._c)
        scores[:, :, :stop] = best.transpose(1, 2).flatten(2)[:, :, :stop]
        return out

    def _on(self, device: torch.device) -> list[Tensor]:
        """Rows, columns and padding on a device: copied once for all layers there, and the host does not wait."""
        if device not in self._copies:
            self._copies[device] = [x.to(device, non_blocking=True) for x in self._on_cpu]
        return self._copies[device]


def _read_again(decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Read the prompt again if the forward has read one into a cache that waits for that (a forward hook)."""
    cache = kwargs.get(CACHE)
    if cache is None:
        results = output.values() if isinstance(output, Mapping) else output
        cache = next((x for x in (*args, *results) if isinstance(x, Cache)), None)
    waiting = [i for i, layer in enumerate(getattr(cache, "layers", ())) if getattr(layer, "prompt", None) is not None]
    if waiting:
        _evict(decoder, inspect.signature(decoder.forward).bind(*args, **kwargs).arguments, cache, waiting)


@torch.compiler.disable(reason="the tokens of a prompt that stay are counted on the host")
@torch.no_grad()
def _evict(decoder: PreTrainedModel, given: Mapping[str, Any], cache: Any, waiting: list[int]) -> None:
    """Read the prompt again, and let the cache's layers ``waiting`` keep the tokens with the largest weights.

    given: the arguments of the decoder's forward that read the prompt.
    """
    layers: dict[int, CondensedCacheLayer] = {i: cache.layers[i] for i in waiting}
    method: Any = layers[waiting[0]].method.reread
    inputs: dict[str, Tensor] = {name: given[name] for name in _INPUTS if given.get(name) is not None}
    real = _real(given.get("attention_mask"), next(iter(inputs.values())))
    tokens = real.sum(1).cpu()
    prompts = {i: layer.prompt.entries for i, layer in layers.items() if layer.prompt is not None}
    scores = {
        i: k.new_zeros(*k.shape[:2], int(tokens.max()), dtype=torch.promote_types(k.dtype, torch.float32))
        for i, (k, _) in prompts.items()
    }
    if any(method.num_kept(n) < n for n in tokens.tolist()):
        _check_given(decoder, given, layers[waiting[0]].method)
        _score(decoder, given, inputs, real, prompts, scores, method)
    kept, counts = method.chosen([*scores.values()], tokens)
    del prompts  # so that each layer can free its prompt in turn
    for layer, of_layer, count in zip(layers.values(), kept, counts, strict=True):
        layer.keep(of_layer, count)


def _check_given(decoder: nn.Module, given: Mapping[str, Any], method: Method) -> None:
    """Raise ValueError, naming ``method``, if a forward was given tensors that cannot be split among the pieces of the
    prompt.
    """
    # once transformers has exported a model, the leaves of a condensed cache are an error
    others = given.keys() - {*_INPUTS} - _OWN - {CACHE, "past_key_values", "kwargs"}
    others = {name for name in others if any(isinstance(leaf, Tensor) for leaf in tree_leaves(given[name]))}
    others |= hook_arguments(decoder) & {"alora_offsets"}  # where adapters of PEFT begin in the prompt
    if others:
        raise ValueError(
            f"{type(method).__name__} reads a prompt again in pieces, for which {type(decoder).__name__} cannot be "
            f"given parts of {', '.join(sorted(others))}: use inputs_embeds that hold them, or a method that keeps all "
            "tokens"
        )


def _score(
    decoder: PreTrainedModel, given: Mapping[str, Any], inputs: Mapping[str, Tensor], real: Tensor,
    prompts: Mapping[int, tuple[Tensor, ...]], scores: Mapping[int, Tensor], method: Reread,
) -> None:  # fmt: skip
    """Set ``scores`` by reading the prompt's pieces again (see `Pieces`). real: from `_real`; prompts: by layer."""
    tokens = real.sum(1).cpu()
    length, B = int(tokens.max()), len(tokens)
    # a row's real slots, in order, then its padding
    order = (~real).to(torch.int8).argsort(dim=1, stable=True)
    config = decoder.config.get_text_config(decoder=True)
    behind = _behind(given.get("position_ids"), real, counts=config.model_type in COUNT_TOKENS)
    c = min(length, method.piece)
    for end in last_positions(config):
        if behind.max() <= end:  # the prompt's positions are before this end, so the pieces' must be too
            behind = behind.clamp(max=end - c)
    positions = (behind[:, None] + torch.arange(c, device="cpu")).to(order.device)
    # a decoder of another repository may have the older name
    argument = CACHE if CACHE in inspect.signature(decoder.forward).parameters else "past_key_values"
    rows, most = torch.arange(B, device=order.device)[:, None, None], _pieces_at_once(decoder, order, c)
    with _rotations_stay(decoder):
        for start in range(0, length, most * c):
            P = min(-(-(length - start) // c), most)
            columns = torch.arange(start, start + P * c, device=order.device).clamp(max=order.shape[1] - 1)
            slots = order[:, columns].unflatten(1, (P, c))
            # an input may be one row for the whole batch
            repeated = {name: x.expand(B, *x.shape[1:])[rows, slots].flatten(0, 1) for name, x in inputs.items()}
            pieces = Pieces(config, method, prompts, scores, tokens, start, (P, c), order.shape[1])
            places = positions.repeat_interleave(P, 0)
            decoder.forward(**repeated, position_ids=places, **{argument: pieces}, use_cache=True)


def _pieces_at_once(decoder: nn.Module, prompts: Tensor, c: int) -> int:
    """Number of pieces of c tokens of each of the prompts ``[B, L]`` to read again at once."""
    if "adapter_names" in hook_arguments(decoder):  # PEFT has one adapter name per prompt, so rows must stay prompts
        return 1
    most = _MOST_TOKENS.get(prompts.device.type, _MOST_ELSEWHERE)
    return max(1, min(most // c, _MOST_ROWS) // len(prompts))


def _behind(positions: Tensor | None, real: Tensor, *, counts: bool) -> Tensor:
    """The position that follows each row's last token, int64 CPU ``[B]``.

    positions: the caller's, ``[..., B or 1, L]``, or None. real: from `_real`. counts: whether the model, given no
    positions, counts real tokens; it counts slots otherwise.
    """
    if positions is None:
        positions = real.cumsum(1) - 1 if counts else torch.arange(real.shape[1], device=real.device)
    if positions.ndim == 3:  # time, height and width in pictures, which some models put after a count of tokens
        positions = positions[-3:].amax(0)
    return positions.to(real.device).expand(real.shape).masked_fill(~real, -1).amax(1).cpu() + 1


@contextmanager
def _rotations_stay(decoder: nn.Module) -> Iterator[None]:
    """Hold rotary embeddings of the type "dynamic" fixed in a ``with`` block: they would grow with the text and rotate
    pieces by other factors than the prompt. Afterwards they are as before.
    """
    grown = [
        (m, {**vars(m)}, {**m._buffers})
        for m in decoder.modules()
        if hasattr(m, "max_seq_len_cached") and "dynamic" in str(getattr(m, "rope_type", "dynamic"))
    ]
    for module, attributes, _ in grown:
        if hasattr(module, "rope_type"):  # others, from other repositories, may hold a table of just that length
            vars(module).update({name: math.inf for name in attributes if name.endswith("max_seq_len_cached")})
    try:
        yield
    finally:
        for module, attributes, buffers in grown:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _real(mask: Any, inputs: Tensor) -> Tensor:
    """The slots of a prompt that hold tokens, bool ``[B, L]``; mask: a user's, or from `condense_mask`."""
    B, L = inputs.shape[:2]
    if isinstance(mask, Mapping):  # one for each kind of layer
        mask = next((x for x in mask.values() if x is not None), None)
    if mask is None:
        return torch.ones(B, L, dtype=torch.bool, device=inputs.device)
    return mask.reshape(B, -1)[:, :L].to(inputs.device, torch.bool)
