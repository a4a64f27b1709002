"""The mask function registered with transformers under the name `condense`, and the padding among new slots.

Attention needs every row right-aligned, which rows padded on the left, as in generation, are already. Padding elsewhere
(second turns of different lengths, padding on the right) is moved to the left, and the outputs are moved back.

Shapes: B rows, H heads, L new slots, D width.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function

# Transformers composes mask functions from closures, which are recognised by name. The first two restrict a causal mask
# to a sliding window and to the documents of a packed row; all layers apply these restrictions themselves. The third
# restricts it to chunks of the text; only layers that the configuration calls chunked apply that.
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_RESTRICTIONS = ("sliding_window_overlay.<locals>.inner_mask", _PACKED)
_CHUNKS = "chunked_overlay.<locals>.inner_mask"
# restricts nothing: it adds to a causal mask what tokens of a block, such as a picture's, see of each other
_BLOCKS = "blockwise_overlay.<locals>.inner_mask"
_UNION = "or_masks.<locals>.or_mask"
# closures over other mask functions, with the name of the variable that holds them
_COMPOSED = {
    "and_masks.<locals>.and_mask": "mask_functions",
    "remap_positions_for_packed_sequence.<locals>.inner_mask": "mask_function",
    _UNION: "mask_functions",
}
# Keyword argument of a model's forward, by which the caller promises that all new tokens are real and that, without
# cu_seq_lens_q, each row is one document. Then no layer reads the mask on the host, which a compiled forward cannot.
ALL_REAL = "condense_all_real"


def condense_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Tensor | int = 0,
    *args: Any,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The padding mask of all slots up to ``n = kv_offset + kv_length``, bool ``[B, 1, 1, n]``, True at tokens.

    Transformers calls this once per forward and, for some caches, passes the result through it again.

    - If the caller gave no mask, all tokens are real: returns the numbers of packed documents, int32 ``[B, 1, 1, L]``,
      if positions mark several, else None. Every layer gets these numbers, while some models give positions to none.
    - For a single token after others in a growing cache, returns None if all tokens are real.
    - Unused slots of a static cache count as padding.
    - A mask that is too short is returned too short, and the attention function raises. With one token and a static
      cache on a GPU the missing columns count as padding, because a check would wait for the device.

    Raises ValueError for a mask function other than a causal, sliding, chunked or packed one. Blocks of tokens that see
    each other (Gemma 3's pictures) are taken if no token is in one.
    """
    has_chunks = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    # transformers sets use_vmap for an or_mask_function or and_mask_function and nothing else; traced ones are not read
    if (use_vmap and torch.compiler.is_compiling()) or not _is_causal(
        mask_function, (*_RESTRICTIONS, _CHUNKS) if has_chunks else _RESTRICTIONS
    ):
        raise ValueError(
            "condensed attention is causal: mask_function must be the plain causal mask, or that of a sliding window, "
            f"chunks or packed documents, got {mask_function} (is_causal=False, block_sequence_ids, or_mask_function "
            "and and_mask_function make others): call condense.restore(model) to have it honoured"
        )
    if attention_mask is None:
        return _documents(mask_function)
    num_slots = kv_offset + kv_length
    # counts of static caches are tensors; their steps may be captured and do not wait for the device
    if q_length == 1 and isinstance(q_offset, int) and _is_all_real(attention_mask, batch_size, num_slots):
        return None
    num_missing = num_slots - attention_mask.shape[1]
    if num_missing > 0 and _covers(attention_mask, q_length, q_offset):
        attention_mask = F.pad(attention_mask, (0, num_missing))
    return attention_mask[:, None, None, :num_slots].to(torch.bool)


def _is_all_real(attention_mask: Tensor, rows: int, num_slots: int) -> bool:
    """True if the mask covers all slots and has no padding; False while it cannot be looked at."""
    if torch.compiler.is_compiling() or (attention_mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    covers = attention_mask.shape[0] == rows and attention_mask.shape[1] >= num_slots
    return covers and bool(attention_mask[:, :num_slots].all())


def _covers(attention_mask: Tensor, q_length: int, q_offset: Tensor | int) -> bool:
    """True if the mask has a column for every token so far, the new ones included."""
    if isinstance(q_offset, Tensor) and (
        torch.compiler.is_compiling() or (q_length == 1 and q_offset.device.type != "cpu")
    ):
        return True
    return attention_mask.shape[1] >= int(q_offset) + q_length


def _is_causal(mask_function: Callable[..., Any], restrictions: tuple[str, ...]) -> bool:
    """True for transformers' causal mask function, alone or with restrictions of these names."""
    if mask_function is causal_mask_function:
        return True
    module = getattr(mask_function, "__module__", None)
    if module is None and torch.compiler.is_compiling():
        return True  # while PyTorch 2.11 traces, closures have no ``__module__``, and composed masks are closures
    if module != masking_utils.__name__:
        return False
    name = mask_function.__qualname__
    if name not in _COMPOSED:
        return name in restrictions
    if torch.compiler.is_compiling():
        # a traced closure cannot be read; what a caller adds to stock masks shows in use_vmap or is a union
        return name != _UNION
    if name == _UNION:
        first, *others = _parts(mask_function)
        return _is_causal(first, restrictions) and all(map(_has_no_block, others))
    return all(_is_causal(part, restrictions) for part in _parts(mask_function))


def _has_no_block(mask_function: Callable[..., Any]) -> bool:
    """True for transformers' mask of blocks of tokens that see each other, if no token is in one (number -1)."""
    if mask_function.__module__ != masking_utils.__name__ or mask_function.__qualname__ != _BLOCKS:
        return False
    return bool((inspect.getclosurevars(mask_function).nonlocals["block_sequence_ids"] < 0).all())


def _parts(mask_function: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """The mask functions that a composed one (`_COMPOSED`) closes over."""
    parts = inspect.getclosurevars(mask_function).nonlocals[_COMPOSED[mask_function.__qualname__]]
    return parts if isinstance(parts, tuple) else (parts,)


def _documents(mask_function: Callable[..., Any]) -> Tensor | None:
    """The numbers of the packed documents that a mask function keeps apart, int32 ``[B, 1, 1, L]``; None without any.

    A closure cannot be read while it is compiled. Then `condense.models.forward.assert_one_document` looks at the
    positions, if the model gives any to its layers; if not, several documents are not noticed.
    """
    if mask_function is causal_mask_function or torch.compiler.is_compiling():
        return None
    if mask_function.__qualname__ == _PACKED:
        numbers: Tensor = inspect.getclosurevars(mask_function).nonlocals["packed_sequence_mask"]
        return numbers[:, None, None].to(torch.int32)
    parts = _parts(mask_function) if mask_function.__qualname__ in _COMPOSED else ()
    return next((found for part in parts if (found := _documents(part)) is not None), None)


class Padding(NamedTuple):
    """The padding of new slots, and the permutation that moves it to the left.

    counts: real tokens per row, int64 CPU ``[B]``. trailing: number of slots at the end that are real in every row.
    pad: bool ``[B, L]``, True at padding. order: int64 ``[B, L]``, the slots with padding first. inverse: the
    permutation that undoes it. Both are None if the padding is on the left already.
    """

    counts: Tensor
    trailing: int
    pad: Tensor
    order: Tensor | None
    inverse: Tensor | None

    def align(self, x: Tensor) -> Tensor:
        """``[B, H, L, D]`` with each row's real tokens at the end."""
        return x if self.order is None else x.take_along_dim(self.order[:, None, :, None], 2)

    def restore(self, out: Tensor) -> Tensor:
        """Outputs ``[B, H, L, D]`` back in slot order, zero at padding."""
        out = out if self.inverse is None else out.take_along_dim(self.inverse[:, None, :, None], 2)
        return out.masked_fill(self.pad[:, None, :, None], 0)


def find_padding(real: Tensor) -> Padding | None:
    """The padding of slots, None without any; real: bool ``[B, L]``, True at tokens. Waits for the device."""
    host = real.cpu()
    if bool(host.all()):
        return None
    counts, pad = host.sum(1), ~real
    trailing = int(host.flip(1).cumprod(1).sum(1).min())
    if bool((host[:, 1:] >= host[:, :-1]).all()):
        return Padding(counts, trailing, pad, None, None)
    order = host.to(torch.int8).argsort(dim=1, stable=True)
    return Padding(counts, trailing, pad, order.to(real.device), order.argsort(dim=1).to(real.device))


def is_real(mask: Tensor, slot: Tensor, num_slots: int, B: int) -> Tensor:
    """Rows whose single new token is real, bool ``[B]``; slot: the token's slot, int64 ``[]``.

    For static caches: does not read the mask on the host. Raises ValueError for a mask of another shape than
    ``[B, 1, 1, num_slots]``, which `condense.models.masks.condense_mask` makes of one that covers all tokens.
    """
    check_mask(mask, B)
    if mask.shape[3] != num_slots:
        raise ValueError(
            f"attention_mask must cover all tokens so far, the cached ones included, got {mask.shape[3]} columns"
        )
    # a compiled step cannot raise when the cache is full: clamp, so that it reads inside the mask
    return mask[:, 0, 0].index_select(1, slot.to(mask.device).clamp(max=num_slots - 1)[None])[:, 0]


def check_mask(mask: Tensor, B: int, num_missing: int = 0) -> None:
    """Raise ValueError unless a mask is bool ``[B, 1, 1, n]``, with no column missing."""
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
