"""The mask function registered with transformers under the name `condense`."""

import inspect
from collections.abc import Callable
from typing import Any

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
# closures over other mask functions, with the name of the variable that holds them
_COMPOSED = {
    "and_masks.<locals>.and_mask": "mask_functions",
    "remap_positions_for_packed_sequence.<locals>.inner_mask": "mask_function",
}


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

    Transformers calls this once per forward and, for some caches, passes the result through it again, which keeps this
    shape.

    - If the caller gave no mask, all tokens are real: returns the numbers of packed documents, int32 ``[B, 1, 1, L]``,
      if positions mark several, else None. Every layer gets these numbers, while some models give positions to none.
    - For a single token after others in a growing cache, returns None if all tokens are real.
    - Unused slots of a static cache count as padding.
    - A mask that is too short is returned too short, and the attention function raises. With one token and a static
      cache on a GPU the missing columns count as padding, because a check would wait for the device.

    Raises ValueError for a mask function other than a causal, sliding, chunked or packed one.
    """
    has_chunks = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    # transformers sets use_vmap for an or_mask_function or and_mask_function and nothing else
    if use_vmap or not _is_causal(mask_function, (*_RESTRICTIONS, _CHUNKS) if has_chunks else _RESTRICTIONS):
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
        return True  # PyTorch 2.11 does not say, while it traces, where a closure is from; composed masks are closures
    if module != masking_utils.__name__:
        return False
    name = mask_function.__qualname__
    if name not in _COMPOSED:
        return name in restrictions
    if torch.compiler.is_compiling():
        return True  # a closure cannot be read there; use_vmap tells what a caller adds to transformers' own masks
    return all(_is_causal(part, restrictions) for part in _parts(mask_function))


def _parts(mask_function: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """The mask functions of which one of `_COMPOSED` is composed."""
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
