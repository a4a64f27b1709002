"""MInference (Jiang et al., 2024): three patterns of sparse prefill, and a pattern for each head, found beforehand.

Shapes: H query heads, K KV heads, L tokens in N blocks of `BLOCK`, D width. One row.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from condense.baselines.blocks import BLOCK, SparseKeys
from condense.baselines.sparse_prefill import SparsePrefill, block_scores, by_distance, last_weights
from condense.config import Natural, Positive
from condense.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class AShape(SparsePrefill):
    """MInference's A-shape pattern (Jiang et al., 2024): the first ``sink`` tokens and the last ``window`` ones.

    Both are rounded up to whole blocks of 128. Unlike `condense.StreamingLLM` it keeps all tokens for decode.
    """

    name: ClassVar[str] = "a_shape"
    sink: Positive = 1024
    window: Positive = 4096

    def choose(self, q: Tensor, k: Tensor, *, scale: float) -> SparseKeys:
        """Choose the same blocks for all heads and all prompts."""
        block = torch.arange(-(-q.shape[2] // BLOCK), device=q.device)
        # the first query of a block sees window - 1 tokens back
        near = block[:, None] - block <= -(-(self.window - 1) // BLOCK)
        return SparseKeys.of_blocks((near | (block * BLOCK < self.sink)).expand(q.shape[1], -1, -1))


@dataclass(frozen=True, kw_only=True)
class BlockSparse(SparsePrefill):
    """MInference's block-sparse pattern (Jiang et al., 2024): a block of queries sees the ``blocks`` best key blocks.

    Blocks of 128 (the paper's: 64) are ranked by mean queries times mean keys; the queries' own block is always seen.
    """

    name: ClassVar[str] = "block_sparse"
    blocks: Positive = 50

    def choose(self, q: Tensor, k: Tensor, *, scale: float) -> SparseKeys:
        """Choose the best key blocks of each query block by Algorithm 3 of the paper."""
        H, K = q.shape[1], k.shape[1]
        scores = block_scores(q[0], k[0].repeat_interleave(H // K, dim=0), scale)
        best = scores.topk(min(self.blocks, scores.shape[2])).indices
        return SparseKeys.of_blocks(torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best, True))


@dataclass(frozen=True, kw_only=True)
class VerticalSlash(SparsePrefill):
    """MInference's vertical-slash pattern (Jiang et al., 2024), the same numbers of lines for all heads.

    The last 64 queries choose, per head: the ``vertical`` tokens with the largest sum of weights, the first 30 always;
    and the ``slash`` distances with the largest sum, the last 100 always, in whole blocks (of 128; the authors' 64).
    """

    name: ClassVar[str] = "vertical_slash"
    vertical: Natural = 1000
    slash: Natural = 6096

    def choose(self, q: Tensor, k: Tensor, *, scale: float) -> SparseKeys:
        """Choose tokens and distances from the last queries' weights by Algorithm 2 of the paper."""
        L = q.shape[2]
        weights = last_weights(q, k, 64, scale)
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
        return SparseKeys(by_distance(steps[:, :N]), chosen)


@dataclass(frozen=True, kw_only=True)
class MInference(SparsePrefill):
    """MInference (Jiang et al., 2024): every query head has a pattern of its own, found by a search beforehand.

    patterns: one per query head, or one for all, as text: ``"vertical_slash:vertical=500,slash=1500"``, ``a_shape`` or
    ``block_sparse`` with settings. ``python benchmarks/analyze patterns`` finds them.
    Raises ValueError for anything else.
    """

    name: ClassVar[str] = "minference"
    patterns: tuple[str, ...] = ("vertical_slash",)

    def __post_init__(self) -> None:
        given: Any = self.patterns
        if isinstance(given, str):  # one text, from the command line
            given = (given,)
        if not isinstance(given, list | tuple) or not given:
            raise ValueError(
                "patterns must be a list of text, one per query head or one for all, got "
                f"{given!r}; python benchmarks/analyze patterns --output FILE finds them, for --method @FILE"
            )
        object.__setattr__(self, "patterns", tuple(given))
        for text in self.patterns:
            pattern_of(text)

    def choose(self, q: Tensor, k: Tensor, *, scale: float) -> SparseKeys:
        """Each head's keys by its pattern. Raises ValueError unless there is one pattern, or one per query head."""
        H, L = q.shape[1], q.shape[2]
        if len(self.patterns) not in (1, H):
            raise ValueError(f"patterns must be one, or one for each of {H} query heads, got {len(self.patterns)}")
        N = -(-L // BLOCK)
        blocks = torch.empty(H, N, N, dtype=torch.bool, device=q.device)
        columns: dict[int, Tensor] = {}
        for text in dict.fromkeys(self.patterns):
            of_text = [h for h in range(H) if self.patterns[h % len(self.patterns)] == text]
            heads = torch.tensor(of_text, device=q.device)
            keys = pattern_of(text).choose(q[:, heads], k[:, heads // (H // k.shape[1])], scale=scale)
            blocks[heads] = keys.blocks
            columns |= dict(zip(heads.tolist(), keys.columns, strict=True))
        return SparseKeys(blocks, pad_sequence([columns[h] for h in range(H)], batch_first=True, padding_value=L))


def pattern_of(text: object) -> AShape | VerticalSlash | BlockSparse:
    """A head's pattern from text such as ``"a_shape:sink=128"``. Raises ValueError for anything else."""
    method = Method.parse(text) if isinstance(text, str) else text
    if not isinstance(text, str) or not isinstance(method, AShape | VerticalSlash | BlockSparse):
        raise ValueError(f"patterns must be a_shape, vertical_slash or block_sparse, with settings, got {text!r}")
    return method


def _sum_of_diagonals(weights: Tensor) -> Tensor:
    """Sums ``[H, L]`` by distance of query and key, of weights ``[H, n, L]`` of the last n of L queries."""
    _, n, L = weights.shape
    # Shift each row by one more than the row before, the last query's first, so that a column has one distance: rows
    # are written with n zeros behind them and read one number shorter, so row r begins with r of the zeros before it.
    written = F.pad(weights.flip(1), (0, n)).flatten(1)
    shifted = written[:, : n * (L + n - 1)].unflatten(1, (n, L + n - 1))
    return shifted.sum(1)[:, :L].flip(-1)
