"""Registering an attention class that is not listed, after checks on a model show that condensing it is right.

Shapes: B rows, L tokens, V vocabulary.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from condense.caches import CACHE
from condense.methods import CCA
from condense.models.apply import use
from condense.models.attention import condensed_class
from condense.models.families import REGISTERED, sliding_window, transformers_model

_LENGTH, _PROMPT, _PADS = 24, 13, 5
_POOLED = CCA(group_size=2, window=4)
# methods that equal the stock layer: one pools nothing within _LENGTH tokens, the other has groups of one token
_STOCK = (CCA(group_size=2, window=_LENGTH), CCA(group_size=1, window=0))


def register(cls: type[nn.Module], model: nn.Module) -> type[nn.Module]:
    """Make `condense.apply` condense the layers of an attention class that it does not know, and return the class.

    model: a causal LM with such layers, in float32 or float64, on which this is checked with random tokens; it stays as
    it is. A tiny one made from a small configuration does as well as the real one. Checked is that with nothing pooled,
    and with groups of one token, the logits are the stock model's; that pooling changes them; that a prompt and single
    steps give the logits of one forward, stock and condensed; that a row padded on the left has the logits that it has
    alone. Logits may differ by rounding, and by twice the difference of the stock model's own forward and steps.
    Register before loading a saved condensed model with this class.
    Raises ValueError, and registers nothing, if a check fails, for a model without such layers and for another dtype.
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
    known = cls in REGISTERED
    REGISTERED.add(cls)
    try:
        with in_eval_mode(base):
            _prove(base, [int(m.layer_idx) for m in found if sliding_window(m) is None])  # type: ignore[arg-type]
    except Exception as error:
        if not known:
            REGISTERED.discard(cls)
        raise ValueError(f"{cls.__name__} cannot be condensed: {error}") from error
    condensed_class(cls)  # makes the condensed subclass, so that pickle finds it
    return cls


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """``model.eval()`` for the length of a ``with`` block; afterwards each module is in the mode it was in before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def _prove(base: PreTrainedModel, layers: list[int]) -> None:
    """Raise ValueError, with the reason as a clause, unless all checks of `register` pass for these layers."""
    embeddings = base.get_input_embeddings()
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(embeddings.num_embeddings, (2, _LENGTH), generator=generator, device="cpu").to(base.device)
    mask = torch.ones_like(ids)
    mask[1, :_PADS] = 0
    stock = _whole(base, ids)
    largest, steps = float(stock.abs().max()), _in_steps(base, ids, torch.ones_like(ids))
    # parts of the model may round to float32, even in a float64 model; half of float32's digits must be right
    rounded = torch.finfo(torch.float32).eps ** 0.5 * largest
    _check(steps, stock, rounded, "the stock model's own prompt and single steps give something else than one forward")
    budget = 2 * _apart(steps, stock) + torch.finfo(base.dtype).eps * _LENGTH * largest
    for method in _STOCK:
        with use(base, method, layers):
            _check(_whole(base, ids), stock, budget, f"under {method}, which pools nothing, it is not the stock model")
    with use(base, dict.fromkeys(layers, _POOLED)):
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
            **{CACHE: cache},
            use_cache=True,
        )
        cache = out[CACHE]
        parts.append(out.logits)
    return torch.cat(parts, dim=1)


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _check(got: Tensor, wanted: Tensor, budget: float, clause: str) -> None:
    """Raise ValueError with the clause if logits differ by more than the budget, or are NaN."""
    if not _apart(got, wanted) <= budget:
        raise ValueError(f"{clause} (logits {_apart(got, wanted):.1e} apart, {budget:.1e} allowed)")
