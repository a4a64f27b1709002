"""Attention classes of a model's own, condensed after a model with them has shown that this is right.

Shapes: B rows, L tokens, V vocabulary.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from condense.methods import CCA
from condense.models.apply import use
from condense.models.attention import condensed_class
from condense.models.families import REGISTERED, sliding_window, transformers_model

_LENGTH, _PROMPT, _PADS = 24, 13, 5
_POOLED = CCA(group_size=2, window=4)
# under these a condensed layer is its stock layer: nothing is pooled yet, and groups of one token
_STOCK = (CCA(group_size=2, window=_LENGTH), CCA(group_size=1, window=0))


def register(cls: type[nn.Module], model: nn.Module) -> type[nn.Module]:
    """Make `condense.apply` condense the layers of an attention class that it does not know, and return the class.

    model: a causal LM with such layers, in float32 or float64. It shows, on random tokens, that condensing these layers
    is right, and stays as it is; a tiny one made from a small configuration does as well as the real one. Shown are:
    with nothing pooled, and with groups of one token, the logits are the stock model's; pooling changes them; a prompt
    and single steps give what one forward gives, stock and condensed; rows padded on the left give what they give
    alone. Differences may be twice those between the stock model's own forward and steps, and rounding.
    Register before loading a saved condensed model with this class.
    Raises ValueError, with the reason, and registers nothing, if one of these does not hold, for a model without such
    layers and for another dtype.
    """
    base = transformers_model(model)
    found = [] if base is None else [m for m in base.modules() if type(m) is cls]
    if base is None or not found:
        raise ValueError(
            f"model must be a transformers model with layers of {cls.__name__}, got {type(model).__name__}"
        )
    if base.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"model must be in float32 or float64, where rounding hides nothing, got {base.dtype}: make a tiny one "
            "from a small configuration"
        )
    known, training = cls in REGISTERED, base.training
    REGISTERED.add(cls)
    base.eval()
    try:
        _prove(base, [int(m.layer_idx) for m in found if sliding_window(m) is None])  # type: ignore[arg-type]
    except Exception as error:
        if not known:
            REGISTERED.discard(cls)
        raise ValueError(f"{cls.__name__} cannot be condensed: {error}") from error
    finally:
        base.train(training)
    condensed_class(cls)  # where pickle finds it
    return cls


@torch.no_grad()
def _prove(base: PreTrainedModel, layers: list[int]) -> None:
    """Raise ValueError, with a clause, unless condensing these layers is right."""
    embeddings = base.get_input_embeddings()
    ids = torch.randint(embeddings.num_embeddings, (2, _LENGTH), generator=torch.Generator().manual_seed(0))
    ids = ids.to(base.device)
    mask = torch.ones_like(ids)
    mask[1, :_PADS] = 0
    stock = _whole(base, ids)
    largest, steps = float(stock.abs().max()), _in_steps(base, ids, torch.ones_like(ids))
    # whatever rounds in the model does so in float32 at least, and keeps half of its digits
    rounded = torch.finfo(torch.float32).eps ** 0.5 * largest
    _check(steps, stock, rounded, "the stock model's own prompt and single steps give something else than one forward")
    budget = 2 * _apart(steps, stock) + torch.finfo(base.dtype).eps * _LENGTH * largest
    for method in _STOCK:
        with use(base, method, layers):
            _check(_whole(base, ids), stock, budget, f"under {method}, which pools nothing, it is not the stock model")
    with use(base, _POOLED, layers):
        whole = _whole(base, ids)
        if _apart(whole, stock) <= budget:
            raise ValueError("pooling changes nothing: its attention is not the function that transformers registers")
        steps = _in_steps(base, ids, torch.ones_like(ids))
        _check(steps, whole, budget, "a prompt and single steps give something else than one forward")
        alone = _whole(base, ids[1:, _PADS:])
        padded = _in_steps(base, ids, mask)[1:, _PADS:]
        _check(padded, alone, budget, "a row padded on the left gives something else than alone")


def _whole(base: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits ``[B, L, V]`` of one forward."""
    return base(input_ids=ids, use_cache=False).logits


def _in_steps(base: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits ``[B, L, V]`` of a prompt and single steps over one cache."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, parts = None, []
    for start, stop in itertools.pairwise([0, *range(_PROMPT, ids.shape[1] + 1)]):
        out = base(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        parts.append(out.logits)
    return torch.cat(parts, dim=1)


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _check(got: Tensor, wanted: Tensor, budget: float, clause: str) -> None:
    if not _apart(got, wanted) <= budget:
        raise ValueError(f"{clause} (logits {_apart(got, wanted):.1e} apart, {budget:.1e} allowed)")
