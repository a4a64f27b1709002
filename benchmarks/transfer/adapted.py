"""Models of the study adapted to pooled layers, windows and layers of Recall, in a form or a calibrated allocation.

Each is learned by distillation from the model's dense self, in groups that grow, on texts of one length.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from makes import new_optimizer, rate_at
from torch import Tensor
from transformers import PreTrainedModel

from condense import CCA, Method, Recall, StreamingLLM, use
from condense.train.growth import grown, trained
from condense.train.loss import token_loss

# what vLLM was measured with (docs/serving.md)
POOLED = CCA(window=1024, summary="streaming", key_pooling="select", rep_bias="log_size")
WINDOW = StreamingLLM(sink=4, window=1020)
# what `recall-device` was
OPENED = Recall(group_size=32, window=256, num_recall=0.25, unchosen="drop", store_bits=4)
_SIZES = (4, 8, POOLED.group_size)  # one after another, each for a third of the time
_WARM_UP = 50  # steps
_EVERY = 10  # steps from one record to the next
ByLayer = Mapping[int | str, Method]


def forms_of(layers: int) -> dict[str, ByLayer]:
    """Methods of a model of so many layers, by name of the form: one for all, or Recall in every fourth layer."""
    fourth = ",".join(map(str, range(3, layers, 4)))
    return {
        "pooled": {"rest": POOLED},
        "pooled, every fourth Recall": {fourth: OPENED, "rest": POOLED},
        "window, every fourth Recall": {fourth: OPENED, "rest": WINDOW},
    }


def adapt(
    model: PreTrainedModel, form: ByLayer, batches: Iterable[tuple[Tensor, Tensor]], passed: Callable[[int], float],
    log: Callable[[dict[str, Any]], None], rate: float,
) -> None:  # fmt: skip
    """Train all weights on batches of tokens and weights ``[B, L]``; ``log`` gets a record at times.

    passed: the share of the training that is over, by the number of steps; at 1 it ends. rate: of learning, at most.
    """
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = new_optimizer(model, rate)
    model.train()
    for step, (ids, weights) in enumerate(batches):
        if (share := passed(step)) >= 1:
            break
        group = _SIZES[int(share * len(_SIZES))]
        for part in optimizer.param_groups:
            part["lr"] = rate_at(share, rate) * min(1.0, (step + 1) / _WARM_UP)
        with use(model, grown(trained(form), group)):
            losses = _step(model, teacher, ids.to(model.device), weights.to(model.device))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % _EVERY == 0:
            log({"group": group, "step": step + 1, "tokens": (step + 1) * ids.numel(), "passed": share} | losses())
    model.eval()


def by_clock(seconds: float) -> Callable[[int], float]:
    """The share of so many seconds that passed since step 0."""
    began = [0.0]

    def passed(step: int) -> float:
        began[0] = began[0] if step else time.monotonic()
        return (time.monotonic() - began[0]) / seconds

    return passed


def _step(model: PreTrainedModel, teacher: Any, ids: Tensor, weights: Tensor) -> Callable[[], dict[str, float]]:
    """The gradient of one batch ``[B, L]``; returns what reads its losses."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        with torch.no_grad():
            taught = teacher(input_ids=ids, use_cache=False).logits
        logits = model(input_ids=ids, use_cache=False).logits
    targets, weights = (x.roll(-1, 1).flatten() for x in (ids, weights))
    weights[ids.shape[1] - 1 :: ids.shape[1]] = 0  # nothing follows the last token
    sums = token_loss(logits.flatten(0, 1), targets, weights, taught.flatten(0, 1), distill=1.0)
    (sums.loss / sums.weights).backward()
    return lambda: {
        "kl": float(sums.kl / sums.weights), "loss": float(sums.ce / sums.weights),
        "answers": float(sums.right / sums.answers.clamp(min=1)),
    }  # fmt: skip
