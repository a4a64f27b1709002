"""Methods that change a cache after the prompt: the last tokens of a text are read over what is left of it.

Shapes: L tokens of a text, n of its prompt, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel

from condense import SnapKV
from condense.models import use
from condense.ops.recall import StoreFormat
from condense.tasks import PasskeySequence

LAST = 512  # tokens whose loss is compared
_BEFORE = 40  # tokens before the first answer at which a prompt ends: above the first question
_GROUP, _EXACT = 64, 128


class FewerBits:
    """A dense cache whose tokens are rounded after the prompt: keys per channel over 64 tokens, values per token; the
    last 128 and a rest below 64 stay as they are. After KIVI (arXiv:2402.02750).
    """

    def __init__(self, bits: int) -> None:
        self.format = StoreFormat(bits, _GROUP)

    def share(self, length: int, width: int, itemsize: int = 2) -> float:
        """Bytes as a share of the dense cache's."""
        packed = (length - _EXACT) // _GROUP * _GROUP
        row = self.format.width(width, width, itemsize)
        return (packed * row + (length - packed) * 2 * width * itemsize) / (length * 2 * width * itemsize)

    def __call__(self, cache: Cache) -> None:
        """Round the tokens of every layer in place."""
        for layer in cache.layers:
            k, v = layer.keys, layer.values
            n = max(0, (k.shape[2] - _EXACT) // _GROUP * _GROUP)
            groups = [x[:, :, :n].unflatten(2, (-1, _GROUP)) for x in (k, v)]
            new_k, new_v = self.format.unpack(self.format.pack(*groups), k.shape[3], v.shape[3], k.dtype)
            layer.keys, layer.values = torch.cat([new_k, k[:, :, n:]], 2), torch.cat([new_v, v[:, :, n:]], 2)


def _read(model: PreTrainedModel, ids: Tensor, n: int, change: Callable[[Cache], None] | None) -> Tensor:
    """Logits ``[L - n, V]`` that predict the tokens from n on, the first of them by the prompt itself."""
    first = model(input_ids=ids[None, :n], use_cache=True, logits_to_keep=1)
    cache: Cache = first.past_key_values
    if change is not None:
        change(cache)
    rest = model(input_ids=ids[None, n:-1], past_key_values=cache, use_cache=True).logits[0]
    return torch.cat([first.logits[0], rest])


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    ways: Mapping[str, SnapKV | FewerBits | None],
    texts: Sequence[np.ndarray],
    questions: Sequence[PasskeySequence],
    asked_in_prompt: int,
) -> list[dict[str, Any]]:
    """Per way: loss of the last `LAST` tokens of each text, and hidden numbers found, asked for after the prompt.

    asked_in_prompt: of so many sequences, SnapKV also reads each question as the end of a prompt of its own, so that it
    knows it when it evicts. None as a way: dense attention.
    """
    device, rows = model.device, []
    for name, way in ways.items():
        change = way if isinstance(way, FewerBits) else None
        method: AbstractContextManager[Any] = use(model, way) if isinstance(way, SnapKV) else nullcontext()
        losses, later, inside = [], [], []
        with method:
            for text in texts:
                ids = torch.from_numpy(text).to(device)
                logits = _read(model, ids, len(ids) - LAST, change)
                losses.append(float(F.cross_entropy(logits.float(), ids[-LAST:])))
            for sequence in questions:
                ids = torch.from_numpy(sequence.input_ids).to(device)
                n = min(start for start, _ in sequence.answers) - _BEFORE
                right = (_read(model, ids, n, change).argmax(-1) == ids[n:]).tolist()
                later += [all(right[start - n : stop - n]) for start, stop in sequence.answers]
            for sequence in questions[:asked_in_prompt] if isinstance(way, SnapKV) else ():
                ids = torch.from_numpy(sequence.input_ids).to(device)
                for start, stop in sequence.answers:
                    right = _read(model, ids[:stop], start, change).argmax(-1) == ids[start:stop]
                    inside.append(bool(right.all()))
        rows.append({
            "name": name, "loss": float(np.mean(losses)), "found": float(np.mean(later)),
            "found_asked_in_prompt": float(np.mean(inside)) if inside else None,
        })  # fmt: skip
    return rows
