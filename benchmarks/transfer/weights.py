"""A trained model in a few small files, so that later questions need no training.

Matrices are rounded to a given number of bits, each row in steps of its own, and packed; the model that is measured
afterwards is the rounded one, so that what a later run says of the files holds for it too.
"""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

_PART = 15 * 2**20  # bytes of a part, at most


def _codes(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    step = weight.abs().amax(-1, keepdim=True).clamp_min(1e-12) / (2 ** (bits - 1) - 1)
    step = step.to(torch.bfloat16).float()
    return (weight / step).round().clamp(-128, 127).to(torch.int8), step


@torch.no_grad()
def save(model: PreTrainedModel, path: Path, bits: int) -> None:
    """Round the model's matrices in place to ``bits`` (2 to 8) and write it in parts, ``path.0``, ``path.1`` and so on;
    vectors stay in bfloat16.
    """
    kept: dict[str, tuple[Tensor, ...]] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            kept[name] = (parameter.to(torch.bfloat16).cpu(),)
            continue
        codes, step = _codes(parameter.float(), bits)
        parameter.copy_(codes.float() * step)
        kept[name] = (codes.cpu(), step.to(torch.bfloat16).cpu())
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    packer = zlib.compressobj(level=6, strategy=zlib.Z_HUFFMAN_ONLY)  # rounded weights repeat nothing
    content = packer.compress(buffer.getvalue()) + packer.flush()
    for index, start in enumerate(range(0, len(content), _PART)):
        path.with_name(f"{path.name}.{index}").write_bytes(content[start : start + _PART])


@torch.no_grad()
def load(model: PreTrainedModel, path: Path) -> None:
    """Fill a model of the same make with the weights that `save` wrote."""
    content = b"".join(part.read_bytes() for part in sorted(path.parent.glob(f"{path.name}.*")))
    kept = torch.load(io.BytesIO(zlib.decompress(content)), weights_only=True)
    for name, parameter in model.named_parameters():
        parts = kept[name]
        parameter.copy_(parts[0] if len(parts) == 1 else parts[0].float() * parts[1].float())
