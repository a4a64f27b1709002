"""The sparsity of dense attention: DGA's Figures 2, 6 and 7 on any model and text.

The weights are those of the last query over all L tokens. They are rho-sparse if one of them is above 1 / (L * rho);
P_sparse(L, rho) is the share of texts where they are. Only this frequency is measured, as in the paper's figures: its
Theorem 1 gives a lower bound of 1 for every distribution, also for equal weights, which are never sparse.

Shapes: L tokens, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from condense.analysis.deviation import stretches
from condense.config import check_int, check_number
from condense.models import attention_layers, check_stock

# edges of the histogram, as multiples of the mean weight 1 / L
EDGES = (0.0, *(2.0**n for n in range(-10, 11)))


@dataclass(frozen=True)
class LayerSparsity:
    """One layer. sparse: rho -> length -> P_sparse, the mean over its heads.

    histogram: shares of the weights that lie between neighbouring `EDGES` times 1 / L, at the longest length; the last
    number is the share above all edges. top: n -> the sum of the n largest weights, the mean over heads and stretches.
    """

    layer: int
    sparse: dict[float, dict[int, float]]
    histogram: tuple[float, ...]
    top: dict[int, float]


@torch.no_grad()
def measure_sparsity(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    rhos: Sequence[float] = (0.05, 0.02, 0.01),
    sequences: int = 100,
    on_step: Callable[[], None] = lambda: None,
) -> list[LayerSparsity]:
    """Sparsity of every attention layer over stretches of the texts, token ids ``[n]`` each.

    model: a causal LM with stock attention, which it has afterwards too. sequences: stretches of each length, divided
    evenly over the texts; a short text gives fewer. on_step is called after every stretch.
    Raises ValueError for a condensed model, lengths below 2 or above that of every text, and rhos outside 0 to 1.
    """
    check_int("sequences", sequences, 1)
    for length in lengths:
        check_int("length", length, 2)
    for rho in rhos:
        check_number("rho", rho, 1e-9, 1.0)
    check_stock(model)
    weights: dict[int, list[list[np.ndarray]]] = {}
    for length in lengths:
        # as many stretches from each text; if that does not divide, the first texts give one more
        counts = [len(range(i, sequences, len(texts))) for i in range(len(texts))]
        parts = [part for ids, n in zip(texts, counts, strict=True) for part in stretches(ids, length, n)]
        if not parts:
            raise ValueError(f"length must be at most that of the longest text, {max(map(len, texts))}, got {length}")
        weights[length] = []
        for part in parts:
            weights[length].append(last_query_weights(model, part))
            on_step()
    return [
        _layer(
            number, {length: np.stack([sample[i] for sample in samples]) for length, samples in weights.items()}, rhos
        )
        for i, number in enumerate(sorted(attention_layers(model)))
    ]


@torch.no_grad()
def last_query_weights(model: PreTrainedModel, ids: Tensor) -> list[np.ndarray]:
    """Dense attention's weights of the last of the tokens ``[L]``, per attention layer ``[H, at most L]`` float32."""
    ids, before = ids[None].to(model.device), model.config._attn_implementation
    cache = model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    model.set_attn_implementation("eager")  # which returns its weights
    try:
        output = model(ids[:, -1:], past_key_values=cache, use_cache=True, output_attentions=True)
    finally:
        model.set_attn_implementation(before)
    return [weights[0, :, 0].float().cpu().numpy() for weights in output.attentions if weights is not None]


def _layer(number: int, weights: dict[int, np.ndarray], rhos: Sequence[float]) -> LayerSparsity:
    """`LayerSparsity` of one layer from its weights ``[stretches, H, L]`` by length."""
    sparse = {rho: {L: float((w.max(-1) > 1 / (w.shape[-1] * rho)).mean()) for L, w in weights.items()} for rho in rhos}
    longest = weights[max(weights)]
    counts = np.histogram(longest * longest.shape[-1], [*EDGES, np.inf])[0]
    ordered = np.sort(longest, -1)[..., ::-1].cumsum(-1)
    top = {n: float(ordered[..., n - 1].mean()) for n in (1, 4, 16, 64, 256, 1024) if n <= longest.shape[-1]}
    return LayerSparsity(number, sparse, tuple((counts / counts.sum()).tolist()), top)
