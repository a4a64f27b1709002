"""Sparse prefill, a family of baselines: prompts are read over chosen keys, all tokens stay in the cache, and later
tokens see all of them, so decode is dense. FlexPrefill and the patterns of MInference have a file each.

Shapes: B rows, H query heads, K KV heads, L tokens in N blocks of `BLOCK`, D and Dv widths. Rows choose separately.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from condense.baselines.blocks import BLOCK, SparseKeys, sparse_attention
from condense.methods.base import Context
from condense.methods.prompt import PromptMethod
from condense.ops import NO_EXTRAS, Extras, RuleSpans
from condense.ops.backends import check_backend
from condense.ops.tensors.per_row import as_rows


@dataclass(frozen=True, kw_only=True)
class SparsePrefill(PromptMethod):
    """Base of methods that read a prompt over chosen keys; they override `choose`."""

    instead: ClassVar[str] = "cca or recall"

    def choose(self, q: Tensor, k: Tensor, *, scale: float) -> SparseKeys:
        """The keys for a prompt of one row, q ``[1, H, L, D]`` and k ``[1, K, L, D]``."""
        raise TypeError(f"{type(self).__name__} must define `choose`")

    def for_latents(self, latent_width: int) -> Self:
        """The method itself: the cache keeps latents, and the keys expanded from them are those to choose from."""
        return self

    @property
    def has_step(self) -> bool:
        """True: a token after the prompt sees all tokens."""
        return type(self).attend is SparsePrefill.attend

    def attend(
        self,
        q: Tensor,
        context: Context,
        *,
        scale: float,
        dropout_p: float = 0.0,
        backend: str = "auto",
        return_lse: bool = False,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of a prompt over its chosen keys, and of later tokens over all keys: here, and not in `read`, each
        head's queries and keys are known.

        Raises ValueError as `check_attention` does, for an unknown backend and, in a prompt, for "triton" and "hopper".
        """
        L = q.shape[2]
        if context.entries.k.shape[2] > 0 or context.window.k.shape[2] > L:  # there are earlier tokens
            return super().attend(
                q, context, scale=scale, dropout_p=dropout_p, backend=backend, return_lse=return_lse, extras=extras
            )
        self.check_attention(scale=scale, dropout_p=dropout_p, extras=extras)
        if check_backend(backend) in ("triton", "hopper"):
            raise ValueError(f"backend {backend!r} has no kernels for prompts of {self}; use backend='auto'")
        assert isinstance(context.spans, RuleSpans)
        window, tokens = context.window, as_rows(L + context.spans.query_start, q.shape[0])
        out = q.new_zeros(*q.shape[:3], window.v.shape[3])
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32))
        for row, n in enumerate(tokens.tolist()):
            if n == 0:  # a row of padding alone
                continue
            q_row, k_row, v_row = (x[row : row + 1, :, L - n :] for x in (q, window.k, window.v))
            with torch.no_grad():
                keys = self.choose(q_row, k_row, scale=scale)
            of_row, lse_row = sparse_attention(q_row, k_row, v_row, keys, scale=scale)
            out[row, :, L - n :], lse[row, :, L - n :] = of_row[0], lse_row[0]
        return extras.finish(out, lse), lse if return_lse else None

    def check_attention(self, *, scale: float, dropout_p: float, extras: Extras = NO_EXTRAS) -> None:
        """Raise ValueError for dropout, as the method is for inference, and for soft-capped scores."""
        if extras.softcap:
            raise ValueError(f"{self} has no soft-capped scores, got a cap of {extras.softcap}: use another method")
        if dropout_p > 0:
            raise ValueError(f"{self} has no dropout: set the model's attention_dropout to 0, got {dropout_p}")


def last_weights(q: Tensor, k: Tensor, count: int, scale: float) -> Tensor:
    """Dense weights of the last ``count`` queries, ``[H, count, L]`` float32 or wider."""
    wide, L = torch.promote_types(q.dtype, torch.float32), q.shape[2]
    count = min(count, L)
    scores = scale * (q[0, :, L - count :].unflatten(0, (k.shape[1], -1)).to(wide) @ k[0][:, None].to(wide).mT)
    future = torch.arange(L, device=q.device) > torch.arange(L - count, L, device=q.device)[:, None]
    return scores.flatten(0, 1).masked_fill_(future, float("-inf")).softmax(-1)


def by_distance(steps: Tensor) -> Tensor:
    """Bool ``[H, N, N]``: query block i sees key block j if j <= i and ``steps`` ``[H, N]`` is True at i - j."""
    block = torch.arange(steps.shape[1], device=steps.device)
    distance = block[:, None] - block
    return steps[:, distance.clamp(min=0)] & (distance >= 0)


def block_means(x: Tensor) -> Tensor:
    """Means of blocks of x ``[n, L, D]``, ``[n, N, D]`` float32 or wider."""
    L, wide = x.shape[1], x.to(torch.promote_types(x.dtype, torch.float32))
    sums = F.pad(wide, (0, 0, 0, -L % BLOCK)).unflatten(1, (-1, BLOCK)).sum(2)
    sums[:, :-1] /= BLOCK
    sums[:, -1] /= (L - 1) % BLOCK + 1
    return sums


def block_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scores ``[H, N, N]`` of mean queries and mean keys of q ``[H, L, D]`` and k ``[H, L, D]``, future blocks -inf."""
    scores = scale * (block_means(q) @ block_means(k).mT)
    block = torch.arange(scores.shape[1], device=q.device)
    return scores.masked_fill_(block > block[:, None], float("-inf"))
