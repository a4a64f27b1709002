"""Tokens that need far text: those that a short context predicts worse (LongPPL, arXiv:2410.23771).

Shapes: L tokens of a text, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

_SLICE = 2048  # positions whose logits are held in float32 at a time
_ROWS = 4  # short contexts read at a time
SHORT = 2048  # tokens of the short context, at most
NEEDS = 1.0  # nats that all the text must be worth more than the short context


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Loss of each token but the first, float32 ``[L]`` with 0 in its place. logits ``[L, V]``, ids ``[L]``."""
    parts = zip(logits[:-1].split(_SLICE), ids[1:].split(_SLICE), strict=True)
    return F.pad(torch.cat([F.cross_entropy(x.float(), y, reduction="none") for x, y in parts]), (1, 0))


@torch.no_grad()
def needs_far(model: PreTrainedModel, ids: Tensor, losses: Tensor) -> Tensor:
    """Tokens of the second half that a short context predicts worse by more than a nat, bool ``[L]``.

    The context is of 2,048 to 2,560 tokens, or a quarter of shorter texts.

    model: with dense attention. ids ``[L]`` int64, L >= 16. losses ``[L]``: with all context; those of the first half
    are not read.
    """
    L = len(ids)
    short = min(SHORT, L // 4)
    block, result = short // 4, torch.zeros(L, dtype=torch.bool, device=ids.device)
    # the last block ends with the text and may begin inside the one before it
    starts = [min(start, L - block) for start in range(L // 2, L, block)]
    for i in range(0, len(starts), _ROWS):
        some = starts[i : i + _ROWS]
        rows = torch.stack([ids[start - short : start + block] for start in some])
        logits = model(input_ids=rows, use_cache=False, logits_to_keep=block + 1).logits[:, :-1]
        targets = rows[:, -block:]
        alone = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        at = torch.tensor(some, device=ids.device)[:, None] + torch.arange(block, device=ids.device)
        result[at.flatten()] = alone - losses[at.flatten()] > NEEDS
    return result
