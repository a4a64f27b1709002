"""What growing and static condensed layers both refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def refuse_stock_tokens(keywords: Mapping[str, Any]) -> None:
    """Raise ValueError unless the keywords of a layer's ``update`` are those that a condensed model gives."""
    if "query_states" not in keywords:
        raise ValueError(
            "this cache holds condensed layers, which only a condensed model can fill: call condense.apply(model, "
            "...) on the model, or give the stock model a new cache"
        )


def refuse_other_dtype(held: torch.dtype, new: torch.dtype) -> None:
    """Raise ValueError for tokens of another dtype than those that a layer holds."""
    if new != held:
        raise ValueError(
            f"condensed cache: wanted {held}, for which it was made, got {new}; make a new cache, and use autocast in "
            "all calls or in none"
        )
