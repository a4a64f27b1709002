"""Which of the new slots hold real tokens: padding anywhere, and packed documents.

Attention wants every row right-aligned. Generation pads on the left, so mostly nothing moves; padding elsewhere
(a ragged second turn, right padding) is moved to the left and the outputs are moved back.

Shapes: B rows, H heads, L new slots, D width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import Cache

# keyword through a model's forward: its new tokens are all real and, unless cu_seq_lens_q says otherwise, one document
# per row; nobody needs to look, which a forward that is compiled as one graph could not
ALL_REAL = "condense_all_real"


class Padding(NamedTuple):
    """counts: real tokens per row, int64 CPU ``[B]``. trailing: slots at the end that are real in every row.
    pad: bool ``[B, L]``. order, inverse: int64 ``[B, L]``, the slots with padding first and back, or None if the
    padding is on the left already.
    """

    counts: Tensor
    trailing: int
    pad: Tensor
    order: Tensor | None
    inverse: Tensor | None

    def align(self, x: Tensor) -> Tensor:
        """``[B, H, L, D]`` with each row's real tokens at the end."""
        return x if self.order is None else _take(x, self.order)

    def restore(self, out: Tensor) -> Tensor:
        """Outputs ``[B, H, L, D]`` back in slot order, zero at padding."""
        out = out if self.inverse is None else _take(out, self.inverse)
        return out.masked_fill(self.pad[:, None, :, None], 0)


def padding_of(mask: Tensor | None, start: int, B: int, L: int, layer_idx: int) -> Padding | None:
    """Padding in columns ``[start, start + L)`` of a key mask bool ``[B, 1, 1, n]``; None if all are real.

    layer_idx: which layer asks. Raises ValueError for a mask of another shape.
    """
    if mask is None:
        return None
    _check_mask(mask, B, max(0, -start, start + L - mask.shape[-1]))
    return _once(mask, ("padding", start, L), layer_idx, lambda: _look(mask[:, 0, 0, start : start + L]))


def is_real(mask: Tensor | None, slot: Tensor, num_slots: int, B: int) -> Tensor | None:
    """Which rows' one new token is real, bool ``[B]``, or None for all; slot: where it stands, int64 ``[]``.

    For static caches: never looks at the mask from the host. Raises ValueError for a mask of another shape than
    ``[B, 1, 1, num_slots]``, which `condense.models.masks.condense_mask` makes of one that covers all tokens.
    """
    if mask is None:
        return None
    _check_mask(mask, B)
    if mask.shape[3] != num_slots:
        raise ValueError(
            f"attention_mask must cover all tokens so far, the cached ones included, got {mask.shape[3]} columns"
        )
    # a step beyond the last slot, which only compiled ones can take unseen, stays inside the mask
    return mask[:, 0, 0].index_select(1, slot.to(mask.device).clamp(max=num_slots - 1)[None])[:, 0]


def documents_of(kwargs: dict[str, Any], B: int, L: int, layer_idx: int, *, plain: bool) -> list[int] | None:
    """Lengths of the documents packed into a row, None if there is one; as transformers recognises them.

    kwargs: of the attention call, layer_idx: which layer makes it. Either ``cu_seq_lens_q`` (int ``[n + 1]``, from 0
    to L) or, in a call with neither cache nor padding (``plain``), ``position_ids`` (int ``[B, L]``) that start again.
    Raises ValueError if several rows are packed, and for marks that do not fit.
    """
    marks: Tensor | None = kwargs.get("cu_seq_lens_q")
    if marks is not None:
        ends = _once(marks, ("marks",), layer_idx, marks.tolist)
        lengths = [stop - start for start, stop in itertools.pairwise(ends)]
        if B != 1 or not lengths or ends[0] != 0 or ends[-1] != L or min(lengths) < 0:
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the {L} tokens of one row of packed documents, got {ends} and {B} "
                "rows"
            )
        return [n for n in lengths if n]
    positions: Tensor | None = kwargs.get("position_ids")
    if not plain or positions is None or L < 2:
        return None
    runs: list[int] | None = _once(positions, ("positions",), layer_idx, lambda: _runs(positions))
    if runs is not None and B != 1:
        raise ValueError(f"packed documents (position_ids that start again) must be one row, got {B} rows")
    return runs


def _check_mask(mask: Tensor, B: int, num_missing: int = 0) -> None:
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != 1 or mask.dtype != torch.bool:
        raise ValueError(
            "attention_mask must be a padding mask [batch, tokens]; condensed attention decides itself who sees "
            f"whom, got a mask of shape {tuple(mask.shape)} and dtype {mask.dtype}"
        )
    if mask.shape[0] != B or num_missing > 0:
        raise ValueError(
            "attention_mask must have a row per sequence and cover all tokens so far, the cached ones included: "
            f"wanted {B} rows, got {mask.shape[0]} rows and {num_missing} tokens too few"
        )


def refuse_cached_documents(module: nn.Module, cache: Cache | None, seen: int) -> None:
    """Training asks for a cache by default and drops it; anybody else would go on with it."""
    if cache is not None and (seen > 0 or not module.training):
        raise ValueError("packed documents (cu_seq_lens_q) cannot be cached: pass use_cache=False")


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(2, index[:, None, :, None].expand_as(x))


def _look(real: Tensor) -> Padding | None:
    host = real.cpu()
    if bool(host.all()):
        return None
    counts, pad = host.sum(1), ~real
    trailing = int(host.flip(1).cumprod(1).sum(1).min())
    if bool((host[:, 1:] >= host[:, :-1]).all()):
        return Padding(counts, trailing, pad, None, None)
    order = host.to(torch.int8).argsort(dim=1, stable=True)
    return Padding(counts, trailing, pad, order.to(real.device), order.argsort(dim=1).to(real.device))


def _runs(positions: Tensor) -> list[int] | None:
    """Lengths of the runs of positions ``[B, L]`` that rise by 1, cut wherever some row is; None for one run."""
    starts = (positions.diff() != 1).any(0).nonzero()[:, 0].add(1).tolist()
    marks = [0, *starts, positions.shape[1]]
    return [b - a for a, b in itertools.pairwise(marks)] if starts else None


# every layer of a forward gets the same mask and position tensors: look at each once, and wait for the GPU once
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _once(tensor: Tensor, key: tuple[Any, ...], layer_idx: int, look: Callable[[], Any]) -> Any:
    """``look()``, remembered for as long as the tensor lives and is not written to.

    What is made in inference mode does not tell that it was: there, a layer that asks again is in another forward.
    """
    known = _known.setdefault(tensor, {})
    if not tensor.is_inference():
        key = (*key, tensor._version)
        if key not in known:
            known[key] = look()
        return known[key]
    answer, asked = known.get(key, (None, {layer_idx}))
    if layer_idx in asked:
        answer, asked = known[key] = look(), set()
    asked.add(layer_idx)
    return answer
