"""Figures of the LCA paper for model shapes that are timed here too, to print beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from condense.bench.model_shapes import MODEL_SHAPES
from condense.bench.rows import Row

HARDWARE = "NVIDIA H200"
PAPER = "the LCA paper"


class Figures(NamedTuple):
    """Seconds to the first token and GiB of cache, dense and condensed by ``method``; None: not given.

    ``source`` says where the paper has them.
    """

    method: str
    length: int
    first_s: tuple[float, float]
    cache_gib: tuple[float, float] | None
    source: str


# "GB" of the caches are GiB: layers x tokens x numbers per token x 2 bytes give exactly these
PUBLISHED: dict[str, tuple[Figures, ...]] = {
    "deepseek-v2-lite": (
        Figures("lca", 65536, (3.20, 1.80), None, "Table 2"),
        # 512 latent numbers and the 64 rotated ones once for each of 16 heads
        Figures("lca", 131072, (10.78, 4.40), (10.13, 0.71), "Table 3, Section 5.3"),
    ),
    "minicpm3-4b": (Figures("lca", 131072, (8.05, 3.61), (4.36, 0.30), "Table 6"),),
    # DeepSeek-R1-Distill-Qwen-7B has this shape; the paper's variant for grouped-query attention
    "qwen2.5-7b": (Figures("lca", 131072, (9.87, 3.04), (7.00, 0.49), "Table 7"),),
}


def published(results: Mapping[str, Any]) -> Sequence[Figures]:
    """The paper's figures of a result file's model: none for a model that is no whole shape of ours."""
    shape = MODEL_SHAPES.get(results["model"])
    whole = shape is not None and results["layers"] == shape["num_hidden_layers"]
    return PUBLISHED.get(results["model"], ()) if whole else ()


def fastest(rows: Sequence[Row], length: int, method: str | None) -> Row | None:
    """Our row of that length with the least time to first token, dense (None) or of any setting of a method."""
    timed = [
        row
        for row in rows
        if row["length"] == length
        and row.get("first")
        and row["condensed"] == (method is not None)
        and (row["method"] or {}).get("method") == method
    ]
    return min(timed, key=lambda row: row["first"]["median_ms"], default=None)
