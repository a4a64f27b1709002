"""Argument checks of the public operations: `ValueError` with argument, wanted, got."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from condense.ops.spans import ArraySpans, Source, Spans
from condense.ops.types import POOLINGS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_shapes(**tensors: tuple[Tensor, str]) -> None:
    """Raise ValueError unless each is a tensor in one of `DTYPES` with the dimensions named beside it.

    Dimensions of one name have one size in all tensors, at least 1; one whose name ends in "?" may be empty.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for name, (x, dimensions) in tensors.items():
        dims = dimensions.split()
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != len(dims):
            raise ValueError(f"{name} must have {len(dims)} dimensions ({dimensions}), got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(str(d) for d in DTYPES)}, got {x.dtype}")
        for dim, size in zip(dims, x.shape, strict=True):
            wanted, first = sizes.setdefault(dim, (size, name))
            if size != wanted:
                raise ValueError(f"{name} must have the {dim} of {first}, {wanted}, got shape {tuple(x.shape)}")
            if size == 0 and not dim.endswith("?"):
                raise ValueError(f"{name} must have at least 1 {dim}, got shape {tuple(x.shape)}")


def check_alike(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have the dtype and device of the first one."""
    first, like = next(iter(tensors.items()))
    for name, x in tensors.items():
        if x.dtype != like.dtype:
            raise ValueError(f"{name} must have the dtype of {first}, {like.dtype}, got {x.dtype}")
        if x.device != like.device:
            raise ValueError(f"{name} must be on the device of {first}, {like.device}, got {x.device}")


def check_float64(device: torch.device) -> None:
    """Raise ValueError for MPS, which has no float64: sums of values and biases are added in it."""
    if device.type == "mps":
        raise ValueError(
            "device must have float64, in which condensed attention adds sums and biases, got mps: use a CPU or CUDA, "
            "as by model.to('cpu') or --device cpu"
        )


def check_sources(q: Tensor, sources: Sequence[Source], spans: Spans) -> None:
    """Raise ValueError unless queries, sources and spans fit together, as `condense.ops.attend` says."""
    if not sources:
        raise ValueError("sources must hold the window at least, got none")
    shapes = {"q": (q, "rows heads queries? width")}
    for i, (k, v, _) in enumerate(sources):
        shapes[f"sources[{i}].k"] = k, f"rows KV-heads tokens-{i}? width"
        shapes[f"sources[{i}].v"] = v, f"rows KV-heads tokens-{i}? value-width"
    check_shapes(**shapes)
    check_alike(**{name: x for name, (x, _) in shapes.items()})
    (B, _, L, _), K = q.shape, sources[-1].k.shape[1]
    for i, (k, _, bias) in enumerate(sources):
        if isinstance(bias, Tensor):
            _check_broadcast(f"sources[{i}].bias", bias, (B, K, k.shape[2]))
            if bias.device != q.device:
                raise ValueError(f"sources[{i}].bias must be on the device of q, {q.device}, got {bias.device}")
    count = len(spans.spans if isinstance(spans, ArraySpans) else spans.rule.spans(1))
    if count != len(sources):
        raise ValueError(f"spans must be one for each source, {len(sources)}, got {count}")
    if isinstance(spans, ArraySpans):
        for i, span in enumerate(spans.spans):
            for x in span:
                _check_broadcast(f"lo and hi of spans[{i}]", x, (B, K, L))
    elif spans.same_in_all_rows() is None and (rows := len(spans.starts())) != B:
        raise ValueError(f"spans must be of the rows of q, {B}, got those of {rows}")


def _check_broadcast(name: str, x: Tensor, sizes: tuple[int, int, int]) -> None:
    """Raise ValueError unless x is ``[B|1, K|1, n]``, for sizes B, K and n."""
    if (
        x.ndim != 3
        or x.shape[2] != sizes[2]
        or any(n != 1 and n != size for n, size in zip(x.shape, sizes, strict=True))
    ):
        raise ValueError(
            f"{name} must have shape {sizes}, or 1 for rows and KV heads that are alike, got {tuple(x.shape)}"
        )


def check_poolings(argument: str, *names: object, scored: bool) -> None:
    """Raise ValueError for names not in `POOLINGS`, and for poolings by scores unless tokens are ``scored``."""
    for name in names:
        if name not in POOLINGS:
            raise ValueError(f"{argument} must be one of {', '.join(map(repr, POOLINGS))}, got {name!r}")
        if name in ("weighted", "select") and not scored:
            raise ValueError(f"{argument} must be 'mean' or 'max' where no summary query scores tokens, got {name!r}")


def check_scale(scale: object, q: Tensor) -> float:
    """Return the softmax scale, ``D ** -0.5`` for None. Raises ValueError unless it is a finite number."""
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    return float(scale)


def check_cu_seqlens(cu_seqlens: Tensor, rows: int, tokens: int, name: str = "cu_seqlens") -> list[int]:
    """Return the lengths of the documents that ``cu_seqlens`` marks in a packed row. Raises ValueError for other marks.

    rows, tokens: size of the batch that holds the documents.
    """
    usable = isinstance(cu_seqlens, Tensor) and cu_seqlens.ndim == 1 and cu_seqlens.dtype in _INTEGERS
    marks = cu_seqlens.tolist() if usable else []
    lengths = [stop - start for start, stop in itertools.pairwise(marks)]
    if not lengths or marks[0] != 0 or marks[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"{name} must be a tensor of integers that rise from 0 to the number of tokens, {tokens}, got {cu_seqlens}"
        )
    if rows != 1:
        raise ValueError(f"{name} needs a batch of 1, got {rows}")
    return lengths


def check_padding(padding: Tensor, q: Tensor) -> Tensor:
    """Return left pads per row, int64 CPU ``[B]``. Raises ValueError for another shape or dtype, or out of range."""
    B, L = q.shape[0], q.shape[2]
    if not isinstance(padding, Tensor) or padding.shape != (B,) or padding.dtype not in _INTEGERS:
        raise ValueError(f"padding must be a tensor of integers of shape ({B},), got {padding!r}")
    pads = padding.cpu().to(torch.int64)
    if bool((pads < 0).any()) or bool((pads > L).any()):
        raise ValueError(f"padding must be between 0 and the number of tokens, {L}, got {pads.tolist()}")
    return pads
