"""MInference's search (Jiang et al., 2024, Algorithm 1): the pattern of sparse prefill that suits each head best.

The candidates are an A-shape, vertical-slash with several numbers of columns, and block-sparse. The other two are as
large as possible without computing more pairs of query and key than the A-shape, counted in the whole blocks that a
kernel reads. The candidate whose keys have the largest share of dense attention's weights wins.

Shapes: H query heads, K KV heads, L tokens, D width. B = 1 row.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from condense.baselines import AShape, BlockSparse, MInference, SparsePrefill, VerticalSlash
from condense.baselines.blocks import BLOCK, SparseKeys, sparse_attention
from condense.files import whole_file
from condense.methods import Context, Dense, settings_of
from condense.models import check_stock, condensed_layers, use
from condense.results import plain, provenance
from condense.version import __version__

# columns of the vertical-slash candidates, and the step by which their distances grow, as in the paper
VERTICALS, STEP = (30, 100, 500, 3000), 50


@dataclass(frozen=True)
class HeadPattern:
    """One query head. pattern: the best candidate, as text that `condense.MInference` takes.

    kept: for each candidate the share of dense attention's weights on the keys that it sees, the mean over queries.
    pairs: for each candidate the pairs of query and key that it computes, divided by those of the A-shape.
    """

    layer: int
    head: int
    pattern: str
    kept: dict[str, float]
    pairs: dict[str, float]


@torch.no_grad()
def search_patterns(
    model: PreTrainedModel, ids: Tensor, budget: AShape, *, on_head: Callable[[], None] = lambda: None
) -> list[HeadPattern]:
    """The best pattern of every query head, layer by layer, on a text of token ids ``[L]``, read in one forward.

    model: a causal LM with stock attention, which it has afterwards too; with MLA, patterns are for the keys expanded
    from latents. budget: the A-shape whose number of pairs no candidate exceeds; the paper has the default of
    `condense.AShape` on a text of 30,000 tokens. on_head is called after every head.
    Raises ValueError for a condensed model, and for a text so short that the budget's pattern sees all of it.
    """
    check_stock(model)
    if len(ids) <= budget.sink + budget.window + BLOCK:
        raise ValueError(
            f"text must have more tokens than {budget} sees at once, {budget.sink + budget.window + BLOCK}, got "
            f"{len(ids)}; take a longer text or a smaller sink and window"
        )
    heads: list[HeadPattern] = []

    def on_read(layer: int, q: Tensor, k: Tensor, scale: float, dense: Tensor) -> None:
        for head in range(q.shape[1]):
            of_head = q[:, head : head + 1], k[:, head // (q.shape[1] // k.shape[1])][:, None]
            heads.append(_best(layer, head, *of_head, scale, dense[:, head : head + 1], budget))
            on_head()

    with use(model, _Watched()):
        layers = sorted(condensed_layers(model))
    with use(model, {layer: _Watched(layer=layer, on_read=on_read) for layer in layers}):
        model(ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    return heads


def patterns_by_layer(heads: Sequence[HeadPattern]) -> dict[int, MInference]:
    """The result of `search_patterns` as a method for each layer."""
    return {
        layer: MInference(patterns=tuple(each.pattern for each in heads if each.layer == layer))
        for layer in dict.fromkeys(each.layer for each in heads)
    }


def save_patterns(
    heads: Sequence[HeadPattern],
    path: Path,
    *,
    budget: AShape,
    length: int,
    device: torch.device | None = None,
    overwrite: bool = False,
) -> None:
    """Write a method for each layer as JSON, with what was measured; ``condense.apply(model, "@PATH")`` reads it.

    length: tokens of the text. device: where it was measured. Raises FileExistsError if there is a file, unless
    overwrite.
    """
    measured = {"provenance": provenance(device=device), "budget": budget, "length": length, "heads": list(heads)}
    document = settings_of(patterns_by_layer(heads)) | {"version": __version__, "patterns": measured}
    with whole_file(path, overwrite=overwrite) as file:
        file.write((json.dumps(plain(document), indent=2, allow_nan=False) + "\n").encode())


@dataclass(frozen=True, kw_only=True)
class _Watched(Dense):
    """Dense attention that hands queries, keys, scale and log-sum-exps of a layer to ``on_read``."""

    layer: int = 0
    on_read: Callable[[int, Tensor, Tensor, float, Tensor], None] = lambda *_: None

    def attend(self, q: Tensor, context: Context, *, scale: float, **settings: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = super().attend(q, context, scale=scale, **settings | {"return_lse": True})
        assert lse is not None
        self.on_read(self.layer, q, context.window.k, scale, lse)
        return out, lse


def seen_pairs(keys: SparseKeys, L: int) -> Tensor:
    """Number of pairs of query and key that a kernel computes, per head, counting whole blocks: int64 ``[H]``."""
    N = keys.blocks.shape[1]
    sizes = torch.full((N,), BLOCK, device=keys.blocks.device)
    sizes[-1] = L - (N - 1) * BLOCK
    lower = keys.blocks.tril().long()
    pairs = torch.einsum("hij,i,j->h", lower.double(), sizes.double(), sizes.double()).long()
    position = keys.columns.clamp(max=L - 1)
    outside = ~lower.bool().gather(2, (position // BLOCK)[:, None].expand(-1, N, -1))  # [H, N, C]
    later = torch.arange(N, device=position.device)[:, None] >= position[:, None] // BLOCK
    valid = (keys.columns < L)[:, None]
    return pairs + ((outside & later & valid).sum(2) * sizes).sum(1)


def _best(layer: int, head: int, q: Tensor, k: Tensor, scale: float, dense: Tensor, budget: AShape) -> HeadPattern:
    """The best pattern for q and k ``[1, 1, L, D]``, whose dense attention has log-sum-exps ``[1, 1, L]``."""
    most = _pairs(budget, q, k, scale)
    kept, pairs = {}, {}
    for method in _candidates(q, k, scale, budget, most):
        name = _as_text(method)
        # not compiled: each head has lists of other lengths
        _, lse = sparse_attention(q, k, k, method.choose(q, k, scale=scale), scale=scale, compiled=False)
        kept[name] = float((lse - dense).exp().mean())
        pairs[name] = _pairs(method, q, k, scale) / most
    return HeadPattern(layer, head, max(kept, key=lambda name: kept[name]), kept, pairs)


def _candidates(q: Tensor, k: Tensor, scale: float, budget: AShape, most: int) -> Iterator[SparsePrefill]:
    """The A-shape, and of each other family the largest that computes at most ``most`` pairs."""
    L = q.shape[2]

    def pairs(family: Callable[[int], SparsePrefill], n: int) -> int:
        return _pairs(family(n), q, k, scale)

    yield budget
    # a family: the method of size n, and the largest n
    families: list[tuple[Callable[[int], SparsePrefill], int]] = [
        *((lambda n, v=v: VerticalSlash(vertical=v, slash=STEP * n), -(-L // STEP)) for v in VERTICALS if v < L),
        (lambda n: BlockSparse(blocks=n), -(-L // BLOCK)),
    ]
    for family, largest in families:
        # the pairs do not fall as n rises, so the number of sizes that fit is the largest size that fits
        size = bisect_right(range(1, largest + 1), most, key=partial(pairs, family))
        if size > 0:
            yield family(size)


def _pairs(method: SparsePrefill, q: Tensor, k: Tensor, scale: float) -> int:
    """Pairs of query and key that one head computes, counted in whole blocks."""
    return int(seen_pairs(method.choose(q, k, scale=scale), q.shape[2])[0])


def _as_text(method: SparsePrefill) -> str:
    """The method as text that `condense.Method.parse` reads."""
    settings = ",".join(f"{name}={value}" for name, value in method.to_dict().items() if name != "method")
    return f"{method.name}:{settings}"
