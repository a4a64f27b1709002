"""Sparse prefill: MInference's vertical-slash pattern and FlexPrefill. Baselines: prompts are read over chosen keys,
all tokens stay in the cache, and later tokens see all of them, so decode is dense.

Shapes: B rows, H query heads, K KV heads, L tokens in N blocks of `BLOCK`, D and Dv widths. Each row has its own index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from condense.config import check_int, check_number
from condense.methods.base import Context, Method, Prompt, PromptPlan
from condense.methods.layout import EACH_TOKEN, Layout, Lookahead
from condense.methods.prompt import exact_prompt
from condense.ops import BLOCK, NO_EXTRAS, Extras, SparseKeys, UniformRule, sparse_attention
from condense.ops.tensors.per_row import PerRow


@dataclass(frozen=True, kw_only=True)
class SparsePrefill(Method):
    """Base of methods that read a prompt over chosen keys; they override `choose`."""

    @property
    def layout(self) -> Layout:
        """All tokens stay."""
        rule = UniformRule(chunk=1, window=None, max_chunks=0)
        return Layout(rule, pooling=EACH_TOKEN, lookahead=Lookahead(False, "cca or recall"))

    @property
    def prompt_reader(self) -> SparsePrompt:
        """The whole prompt in one forward, since its last queries choose for all."""
        return SparsePrompt(self)

    def choose(self, q: Tensor, k: Tensor, *, scale: float) -> SparseKeys:
        """The keys for a prompt of one row, q ``[1, H, L, D]`` and k ``[1, K, L, D]``."""
        raise TypeError(f"{type(self).__name__} must define `choose`")

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
        """A prompt over its chosen keys, later tokens over all.

        Raises ValueError as `check_attention` and, in a prompt, for the backends "triton" and "hopper".
        """
        if not context.extra:
            return super().attend(
                q, context, scale=scale, dropout_p=dropout_p, backend=backend, return_lse=return_lse, extras=extras
            )
        self.check_attention(scale=scale, dropout_p=dropout_p, extras=extras)
        if backend in ("triton", "hopper"):
            raise ValueError(f"backend {backend!r} has no kernels for prompts of {self}; use backend='auto'")
        window, tokens, L = context.window, context.extra[0], q.shape[2]
        out = q.new_zeros(*q.shape[:3], window.v.shape[3])
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32))
        for row, (n, keys) in enumerate(zip(tokens.tolist(), chosen_keys(context), strict=True)):
            if n == 0:  # a row of padding alone
                continue
            q_row, k_row, v_row = (x[row : row + 1, :, L - n :] for x in (q, window.k, window.v))
            of_row, lse_row = sparse_attention(q_row, k_row, v_row, keys, scale=scale)
            out[row, :, L - n :], lse[row, :, L - n :] = of_row[0], lse_row[0]
        return extras.finish(out, lse), lse if return_lse else None

    def check_attention(self, *, scale: float, dropout_p: float, extras: Extras = NO_EXTRAS) -> None:
        """Raise ValueError for dropout, as the method is for inference, and for soft-capped scores."""
        if extras.softcap:
            raise ValueError(f"{self} has no soft-capped scores, got a cap of {extras.softcap}: use another method")
        if dropout_p > 0:
            raise ValueError(f"{self} has no dropout: set the model's attention_dropout to 0, got {dropout_p}")


class SparsePrompt(NamedTuple):
    """How a `SparsePrefill` reads a prompt: a `condense.methods.base.PromptReader`."""

    method: SparsePrefill

    def read(self, q: Tensor, k: Tensor, v: Tensor, plan: PromptPlan, *, scale: float, backend: str) -> Prompt:
        """All tokens are kept; ``extra`` holds the rows' tokens, then blocks and columns row by row."""
        B, L = k.shape[0], k.shape[2]
        tokens = plan.tokens(B)
        context, kept = exact_prompt(k, v, tokens)
        chosen: list[Tensor] = []
        with torch.no_grad():
            for row, n in enumerate(tokens.tolist()):
                of_row = (x[row : row + 1, :, L - n :] for x in (q, k))
                chosen += self.method.choose(*of_row, scale=scale) if n > 0 else _no_keys(q)
        return Prompt(context._replace(extra=(tokens, *chosen)), kept)

    def num_entries(self, tokens: PerRow) -> PerRow:
        """All tokens stay."""
        return tokens

    def num_focal(self, tokens: PerRow) -> PerRow:
        """All entries are single tokens."""
        return tokens


def _no_keys(q: Tensor) -> SparseKeys:
    """The keys of a row without tokens, for as many heads as q ``[B, H, L, D]`` has."""
    H = q.shape[1]
    return SparseKeys(q.new_empty(H, 0, 0, dtype=torch.bool), q.new_empty(H, 0, dtype=torch.int64))


def chosen_keys(context: Context) -> list[SparseKeys]:
    """The keys that were chosen for each row of a prompt."""
    return [SparseKeys(*pair) for pair in zip(context.extra[1::2], context.extra[2::2], strict=True)]


@dataclass(frozen=True, kw_only=True)
class VerticalSlash(SparsePrefill):
    """MInference's vertical-slash pattern (Jiang et al., 2024), the same numbers of lines for all heads.

    The last 64 queries choose, per head: the ``vertical`` tokens with the largest sum of weights, the first 30 always,
    seen by all later queries; and the ``slash`` distances with the largest sum, the last 100 always, seen in whole
    blocks (of 128; the authors' kernel has 64). The paper's search of patterns and numbers per head is not included.
    Raises ValueError for numbers below 0.
    """

    name: ClassVar[str] = "vertical_slash"
    vertical: int = 1000
    slash: int = 6096

    def __post_init__(self) -> None:
        check_int("vertical", self.vertical, 0)
        check_int("slash", self.slash, 0)

    def choose(self, q: Tensor, k: Tensor, *, scale: float) -> SparseKeys:
        """Algorithm 2 of the paper: lines from the last queries' weights."""
        L = q.shape[2]
        weights = _last_weights(q, k, 64, scale)
        columns = weights.sum(1)
        distances = _sum_of_diagonals(weights)
        columns[:, :30], distances[:, :100] = float("inf"), float("inf")
        chosen = columns.topk(min(self.vertical, L)).indices.sort().values
        far = distances.topk(min(self.slash, L)).indices
        N = -(-L // BLOCK)
        # a distance reaches from a block of queries into one or two blocks of keys
        steps = torch.zeros(q.shape[1], N + 1, dtype=torch.bool, device=q.device)
        steps[:, 0] = True
        for step in (far // BLOCK, -(-far // BLOCK)):
            steps.scatter_(1, step, True)
        return SparseKeys(_by_distance(steps[:, :N]), chosen)


@dataclass(frozen=True, kw_only=True)
class FlexPrefill(SparsePrefill):
    """FlexPrefill (Lai et al., 2025): as few blocks of 128 keys as hold ``gamma`` of the estimated weights, per head.

    Where the blocks' weights estimated from mean queries and mean keys lie within ``tau`` (Jensen-Shannon distance) of
    those of the last 128 queries, these estimates choose for every block of queries; elsewhere the last queries choose
    columns and diagonals of blocks. At least ``min_budget`` tokens' worth of blocks each, the first block and the
    queries' own always.
    Raises ValueError for a field out of range.
    """

    name: ClassVar[str] = "flex_prefill"
    gamma: float = 0.9
    tau: float = 0.1
    min_budget: int = 1024

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, 0.0, 1.0)
        check_number("tau", self.tau, 0.0, 1.0)
        check_int("min_budget", self.min_budget, 1)

    def choose(self, q: Tensor, k: Tensor, *, scale: float) -> SparseKeys:
        """Algorithms 1 to 4 of the paper."""
        H, L = q.shape[1], q.shape[2]
        N, last = -(-L // BLOCK), min(BLOCK, L)
        least = min(N, -(-self.min_budget // BLOCK))
        weights = _last_weights(q, k, last, scale)
        true = _per_block(weights.mean(1))
        mean_k = _block_means(k[0]).repeat_interleave(H // k.shape[1], dim=0)
        wide = mean_k.dtype
        mean_last = q[0, :, L - last :].to(wide).mean(1, keepdim=True)
        estimate = (scale * (mean_last @ mean_k.mT))[:, 0].softmax(-1)
        aware = _js_distance(estimate, true) < self.tau

        own = torch.arange(N, device=q.device)
        scores = (scale * (_block_means(q[0]) @ mean_k.mT)).masked_fill(own > own[:, None], float("-inf")).softmax(-1)
        by_query = _cover(scores.flatten(1) / N, self.gamma, 0).unflatten(1, (N, N))
        by_query |= torch.zeros_like(by_query).scatter_(2, scores.topk(least).indices, True)

        diagonals = torch.zeros_like(true)
        of_query = (torch.arange(L - last, L, device=q.device) // BLOCK)[:, None]
        distance = (of_query - torch.arange(L, device=q.device) // BLOCK).clamp(min=0)
        diagonals.scatter_add_(1, distance.flatten().expand(H, -1), weights.flatten(1) / last)
        lines = _cover(true, self.gamma, least)[:, None] | _by_distance(_cover(diagonals, self.gamma, least))

        blocks = torch.where(aware[:, None, None], by_query, lines)
        blocks[:, :, 0] = True
        blocks[:, own, own] = True
        return SparseKeys(blocks.tril(), torch.empty(H, 0, dtype=torch.int64, device=q.device))


def _last_weights(q: Tensor, k: Tensor, count: int, scale: float) -> Tensor:
    """Dense weights of the last ``count`` queries, ``[H, count, L]`` float32 or wider."""
    wide, L = torch.promote_types(q.dtype, torch.float32), q.shape[2]
    count = min(count, L)
    scores = scale * (q[0, :, L - count :].unflatten(0, (k.shape[1], -1)).to(wide) @ k[0][:, None].to(wide).mT)
    future = torch.arange(L, device=q.device) > torch.arange(L - count, L, device=q.device)[:, None]
    return scores.flatten(0, 1).masked_fill_(future, float("-inf")).softmax(-1)


def _sum_of_diagonals(weights: Tensor) -> Tensor:
    """Sums ``[H, L]`` by distance of query and key, of weights ``[H, n, L]`` of the last n of L queries."""
    _, n, L = weights.shape
    # row r, of query L - n + r, is shifted by what it lacks to the last query, so that distances stand in columns
    shifted = torch.stack([F.pad(weights[:, r], (n - 1 - r, 0))[:, :L] for r in range(n)], dim=1)
    return shifted.sum(1).flip(-1)


def _by_distance(steps: Tensor) -> Tensor:
    """Blocks bool ``[H, N, N]`` of query block i and key block j with steps ``[H, N]`` True at i - j >= 0."""
    block = torch.arange(steps.shape[1], device=steps.device)
    distance = block[:, None] - block
    return steps[:, distance.clamp(min=0)] & (distance >= 0)


def _per_block(x: Tensor) -> Tensor:
    """Sums of blocks of x ``[H, L]``, ``[H, N]``."""
    return F.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK)).sum(2)


def _block_means(x: Tensor) -> Tensor:
    """Means of blocks of x ``[n, L, D]``, ``[n, N, D]`` float32 or wider."""
    L, wide = x.shape[1], x.to(torch.promote_types(x.dtype, torch.float32))
    sums = F.pad(wide, (0, 0, 0, -L % BLOCK)).unflatten(1, (-1, BLOCK)).sum(2)
    sums[:, :-1] /= BLOCK
    sums[:, -1] /= (L - 1) % BLOCK + 1
    return sums


def _cover(share: Tensor, gamma: float, least: int) -> Tensor:
    """The fewest largest of share ``[H, n]`` (sum 1) that reach gamma together, at least ``least``: bool ``[H, n]``."""
    ordered, order = share.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(1) - ordered
    wanted = (before < gamma) | (torch.arange(share.shape[1], device=share.device) < least)
    return torch.zeros_like(wanted).scatter_(1, order, wanted)


def _js_distance(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence of rows ``[H, n]``, in nats."""
    mean = (p + q) / 2
    return ((torch.xlogy(p, p / mean) + torch.xlogy(q, q / mean)).sum(1) / 2).clamp(min=0).sqrt()
