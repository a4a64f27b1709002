"""Distances of tokens from the entries that stand for them: LCA's Tables 9 and 10 on any model and text.

Theorem 1 bounds the error of condensed attention by the largest of these deviations, if entries weigh as much as their
tokens (``rep_bias="log_size"``).

Shapes: B rows, K KV heads (with latent attention: all heads), L tokens, M entries of g tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from condense.caches import CACHE, CondensedLayer, ReadRequest
from condense.config import check_int
from condense.methods import Context, Method
from condense.methods.grouped import GroupPooling
from condense.models import attention_layers, check_stock, condensed_layers, use
from condense.models.families import check_learned_positions, is_latent
from condense.models.mla import up_projection

_GROUPS_AT_ONCE = 256
ObserverT = TypeVar("ObserverT", bound=CondensedLayer)


@dataclass(frozen=True)
class VectorDeviation:
    """Distances in the Euclidean norm, over all tokens that entries stand for.

    norm: mean norm of the exact vectors. deviation: mean distance of a token from its entry. relative: deviation /
    norm. largest: the largest distance, which is the delta of Theorem 1.
    """

    norm: float
    deviation: float
    relative: float
    largest: float


@dataclass(frozen=True)
class LayerDeviation:
    """One layer, its heads together."""

    layer: int
    keys: VectorDeviation
    values: VectorDeviation


@dataclass(frozen=True)
class Deviation:
    """One text at one length: all condensed layers together (every layer counts alike) and each alone.

    tokens: condensed tokens per layer and head, in all sequences.
    """

    text: str
    length: int
    sequences: int
    tokens: int
    keys: VectorDeviation
    values: VectorDeviation
    layers: tuple[LayerDeviation, ...]


@torch.no_grad()
def measure_deviation(
    model: PreTrainedModel,
    method: Method,
    texts: Mapping[str, Tensor],
    lengths: Sequence[int],
    *,
    layers: Iterable[int] | None = None,
    sequences: int = 8,
    on_step: Callable[[], None] = lambda: None,
) -> list[Deviation]:
    """Deviations of keys and values from their entries, for each text and length.

    The model reads the text with the method, so these are the keys and values of its condensed layers; with latent
    attention, entries and tokens are compared after the up-projection of every head.
    model: a causal LM with stock attention, which it has afterwards too. method: `condense.CCA` or `condense.LCA`.
    layers: indices to condense; None means all that can be.
    texts: name to token ids ``[n]``, from which up to ``sequences`` stretches of each length are cut, evenly spread
    and without overlap. on_step is called after every stretch.
    Raises ValueError for a model or a layer that cannot be condensed, a model that is condensed already, another kind
    of method, a length at which no group closes or that exceeds a text or the model's learned positions, and counts
    below 1.
    """
    check_int("sequences", sequences, 1)
    if not isinstance(Method.parse(method), GroupPooling):
        raise ValueError(f"method must pool groups of tokens, such as condense.LCA() or condense.CCA(), got {method}")
    check_stock(model)
    _check_lengths(model, method, texts, lengths)
    chosen = None if layers is None else list(layers)
    return [
        _measure(model, method, chosen, name, stretches(ids, length, sequences), on_step)
        for name, ids in texts.items()
        for length in lengths
    ]


def stretches(ids: Tensor, length: int, count: int) -> list[Tensor]:
    """Up to ``count`` stretches of ``length`` tokens, evenly spread over ids ``[n]``, none overlapping."""
    count = min(count, len(ids) // length)
    gap = 0 if count == 1 else (len(ids) - length) // (count - 1)
    return [ids[i * gap : i * gap + length] for i in range(count)]


def observe(
    model: Any, observer: Callable[[nn.Module], ObserverT], parts: Sequence[Tensor], on_step: Callable[[], None]
) -> dict[int, ObserverT]:
    """Read each part in one forward of a condensed model; return the cache layers that observed it, one per layer.

    observer: makes such a layer for an attention module. on_step is called after every part.
    """
    attentions = attention_layers(model)
    observers = {i: observer(attentions[i]) for i in sorted(condensed_layers(model))}
    for part in parts:
        cache = DynamicCache(config=model.config)
        for i, layer in observers.items():
            layer.reset()
            cache.layers[i] = layer
        model(part[None].to(model.device), **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        on_step()
    return observers


def _check_lengths(model: Any, method: Method, texts: Mapping[str, Tensor], lengths: Sequence[int]) -> None:
    for length in lengths:
        check_int("length", length, 1)
        if method.layout.rule.closed(length) == 0:
            raise ValueError(f"length must be such that {method} condenses something, got {length}")
        check_learned_positions(model.config, "length", length)
        for name, ids in texts.items():
            if len(ids) < length:
                raise ValueError(f"length must be at most the {len(ids)} tokens of {name}, got {length}")


def _measure(
    model: PreTrainedModel,
    method: Method,
    chosen: list[int] | None,
    name: str,
    parts: list[Tensor],
    on_step: Callable[[], None],
) -> Deviation:
    with use(model, method, chosen):
        layers = observe(model, lambda module: _Observer(method, module), parts, on_step)
    reports = tuple(
        LayerDeviation(i, layer.keys_seen.result(), layer.values_seen.result()) for i, layer in layers.items()
    )
    length = len(parts[0])
    return Deviation(
        text=name,
        length=length,
        sequences=len(parts),
        tokens=len(parts) * int(method.layout.rule.closed(length)) * method.layout.rule.chunk,
        keys=_over_layers([report.keys for report in reports]),
        values=_over_layers([report.values for report in reports]),
        layers=reports,
    )


def _over_layers(layers: list[VectorDeviation]) -> VectorDeviation:
    """One deviation of all layers: means over layers, and the largest distance of any."""
    norm = sum(layer.norm for layer in layers) / len(layers)
    deviation = sum(layer.deviation for layer in layers) / len(layers)
    return VectorDeviation(norm, deviation, deviation / norm, max(layer.largest for layer in layers))


class _Observer(CondensedLayer):
    """A cache layer that measures the deviations of the keys and values that it condenses."""

    def __init__(self, method: Method, module: nn.Module) -> None:
        super().__init__(method)
        self.module = module
        self.keys_seen, self.values_seen = _Total(), _Total()

    def read(self, k: Tensor, v: Tensor, request: ReadRequest) -> Context:
        """Read as the base class and measure. The context holds the whole sequence, which is read in one forward."""
        context = super().read(k, v, request)
        closed, g = int(self.method.layout.rule.closed(k.shape[2])), self.method.layout.rule.chunk
        for start in range(0, closed, _GROUPS_AT_ONCE):
            stop = min(start + _GROUPS_AT_ONCE, closed)
            tokens = self._heads(*(x[:, :, start * g : stop * g] for x in (context.window.k, context.window.v)))
            entries = self._heads(*(x[:, :, start:stop] for x in (context.entries.k, context.entries.v)))
            for total, exact, pooled in zip((self.keys_seen, self.values_seen), tokens, entries, strict=True):
                total.add(exact.unflatten(2, (-1, g)), pooled[:, :, :, None])
        return context

    def _heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values per head, expanded from latents if k holds these."""
        if not is_latent(self.module):
            return k, v
        module: Any = self.module
        return up_projection(module, module.num_heads, k).expand(k)


class _Total:
    """Sums over vectors, in float64 on the CPU."""

    def __init__(self) -> None:
        self.count = 0
        self.norm = self.deviation = self.largest = 0.0

    def add(self, exact: Tensor, pooled: Tensor) -> None:
        """exact ``[B, K, M, g, D]``, pooled ``[B, K, M, 1, D]``."""
        wide = torch.promote_types(exact.dtype, torch.float32)
        norms, distances = exact.to(wide).norm(dim=-1), (exact.to(wide) - pooled.to(wide)).norm(dim=-1)
        self.count += norms.numel()
        self.norm += float(norms.double().sum())
        self.deviation += float(distances.double().sum())
        self.largest = max(self.largest, float(distances.max()))

    def result(self) -> VectorDeviation:
        norm, deviation = self.norm / self.count, self.deviation / self.count
        return VectorDeviation(norm, deviation, deviation / norm, self.largest)
