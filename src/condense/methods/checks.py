"""Checks of what a method's own code returns: entries by `Method.represent`, outputs by `Method.attend`."""

from typing import Any

import torch
from torch import Tensor

from condense.methods.base import Context, Method


def check_entries(method: Method, new: object, k: Tensor, v: Tensor, num_chunks: int) -> None:
    """Raise ValueError unless ``new``, made by `Method.represent`, holds the entries of ``num_chunks`` chunks."""
    layout, name = method.layout, f"{type(method).__name__}.represent"
    shape = (*k.shape[:2], num_chunks * layout.rule.entries)
    tensors = new if isinstance(new, tuple) and all(isinstance(x, Tensor) for x in new) else ()
    # compared by ==, because under torch.compile `in` does not recognise a length that varies
    fits = all(
        any(x.shape == (*shape, width) for width in (token.shape[3], 0)) and x.dtype == token.dtype
        for x, token in zip(tensors, (k, v), strict=False)
    )
    if len(tensors) < 2 or not fits:
        raise ValueError(
            f"{name} must return keys {(*shape, k.shape[3])} and values {(*shape, v.shape[3])} in {k.dtype} and "
            f"{v.dtype}, as a tuple, got {_described(new)}"
        )
    extra = tensors[2:]
    if layout.matched and not (
        extra and extra[0].shape == (*shape, 1) and extra[0].dtype in (torch.float32, torch.float64)
    ):
        raise ValueError(
            f"{name} must return biases {(*shape, 1)}, float32 or wider, after keys and values, as its layout is "
            f"matched, got {_described(extra) if extra else 'none'}"
        )
    reads_more = type(method).attend is not Method.attend and layout.coarse is None
    if len(extra) > layout.matched and not reads_more:
        raise ValueError(
            f"{name} must return keys and values{' and biases' if layout.matched else ' alone'}, as only an `attend` "
            f"of the method's own reads more, without coarse entries, got {len(tensors)} tensors"
        )
    if any(x.dim() < 3 or x.shape[:2] != shape[:2] or x.shape[2] % num_chunks for x in extra):
        raise ValueError(
            f"{name} must return further tensors of shape [{shape[0]}, {shape[1]}, n * {num_chunks}, ...], as many "
            f"columns for each chunk, got {_described(extra)}"
        )


def attend_checked(
    method: Method, q: Tensor, context: Context, *, return_lse: bool = False, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`Method.attend` of q ``[B, H, L, D]``; raises ValueError if an `attend` of the method's own returns other shapes.

    Transposed as transformers' attention functions return it, an output would pass the projection behind it unnoticed.
    """
    result = method.attend(q, context, return_lse=return_lse, **options)
    if type(method).attend is Method.attend:
        return result
    out, lse = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    shape, dtype = (*q.shape[:3], context.window.v.shape[3]), q.dtype
    fits = result is not out and isinstance(out, Tensor) and out.shape == shape and out.dtype == dtype
    if not fits or (return_lse and not (isinstance(lse, Tensor) and lse.shape == shape[:3])):
        raise ValueError(
            f"{type(method).__name__}.attend must return an output {shape} {dtype} and, if return_lse, a log-sum-exp "
            f"{shape[:3]}, as a tuple, got {_described(result)}"
        )
    return out, lse if return_lse else None


def _described(result: object) -> str:
    """Shapes and dtypes of the tensors in a tuple and the types of its other parts, for error messages; else a type."""
    if not isinstance(result, tuple) or not result:
        return type(result).__name__
    return ", ".join(f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__ for x in result)
