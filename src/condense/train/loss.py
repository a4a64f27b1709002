"""The loss of next tokens: cross entropy, and what the model loses against its dense self (KL), a block at a time.

N: tokens of a batch; V: vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_BLOCK = 2**24  # float32 logits at a time: 64 MiB per intermediate result


class TokenLoss(NamedTuple):
    """Sums over the tokens of one batch, each weighted; scalars, all but ``loss`` without gradients.

    loss: what is trained on, ``(1 - distill) * ce + distill * kl``. ce: cross entropy. kl: forward KL, 0 without a
    teacher. answers, right: tokens of weight above 1, and how many of those the likeliest prediction gets right.
    """

    loss: Tensor
    ce: Tensor
    kl: Tensor
    weights: Tensor
    answers: Tensor
    right: Tensor


def token_loss(
    logits: Tensor, targets: Tensor, weights: Tensor, teacher: Tensor | None = None, distill: float = 0.0
) -> TokenLoss:
    """Sum of the tokens' losses, ``w * ((1 - distill) * ce + distill * KL(teacher || model))``.

    Both terms and their gradient are computed in one pass over blocks of tokens, in float32 (float64 for float64
    logits). No float32 copy of all logits exists: beside the logits themselves there is one tensor of their size and
    dtype, the gradient, which takes the teacher's memory if that has the same dtype.

    logits: ``[N, V]``, any floating dtype. targets: ``[N]`` int64. weights: ``[N]`` float32, not negative.
    teacher: ``[N, V]`` logits of the model that is imitated, any floating dtype; its contents are lost. None: no
    distillation. distill: share of the KL in the loss, 0 to 1. The gradient is kept once and scaled in place: a second
    backward pass, and a gradient of the gradient, raise RuntimeError.
    """
    return TokenLoss(*_TokenLoss.apply(logits, targets, weights, teacher, distill))


class _TokenLoss(torch.autograd.Function):
    """Gradient of a token's loss by its logits: ``w * (p - distill * p_teacher - (1 - distill) * onehot)``."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor, teacher: Tensor | None, distill: float
    ) -> tuple[Tensor, ...]:
        N, V = logits.shape
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        reused = teacher is not None and teacher.dtype == logits.dtype and teacher.is_contiguous()
        gradient = teacher if reused else torch.empty_like(logits, memory_format=torch.contiguous_format)
        assert gradient is not None
        sums = torch.zeros(6, dtype=dtype, device=logits.device)
        share = 0.0 if teacher is None else distill
        rows = max(1, _BLOCK // V)
        for start in range(0, N, rows):
            block = slice(start, start + rows)
            target, w = targets[block, None], weights[block].to(dtype)
            x = logits[block].to(dtype)
            right = (x.argmax(-1) == target[:, 0]) & (w > 1)
            log_p = x.log_softmax(-1)
            ce = -log_p.gather(1, target)[:, 0]
            if teacher is None:
                kl, wanted = torch.zeros_like(ce), torch.zeros_like(log_p)
            else:
                log_t = teacher[block].to(dtype).log_softmax(-1)
                wanted = log_t.exp()
                kl = (wanted * (log_t - log_p)).sum(-1)
                wanted *= share
            wanted.scatter_add_(1, target, torch.full_like(ce, 1 - share)[:, None])
            gradient[block] = log_p.exp_().sub_(wanted).mul_(w[:, None])
            loss = (1 - share) * ce + share * kl
            sums += torch.stack([(w * loss).sum(), (w * ce).sum(), (w * kl).sum(), w.sum(), (w > 1).sum(), right.sum()])
        ctx.save_for_backward(gradient)
        parts = sums.unbind()
        ctx.mark_non_differentiable(*parts[1:])
        return parts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        (by_logits,) = ctx.saved_tensors
        return by_logits.mul_(gradient.to(by_logits.dtype)), None, None, None, None
