"""The arguments that operations share.

Shapes: B rows, H query heads, K KV heads, L queries, N tokens of the window, G chunks of c tokens, D and Dv widths.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from condense.ops.tensors.per_row import PerRow, as_rows, int_if_equal

Pooling = Literal["weighted", "mean", "max", "select"]
POOLINGS: tuple[Pooling, ...] = ("weighted", "mean", "max", "select")


class Chunks(NamedTuple):
    """G chunks of ``size`` tokens each in the window, window_k ``[B, K, N, D]`` and window_v ``[B, K, N, Dv]``.

    columns: first column of each chunk in the window, >= 0. numbers: number of chunks before it in its row or packed
    document. Both are int64 ``[B|1, G]`` on the device of the window; or an int, that of the first chunk, if the chunks
    follow one another without gaps and are alike in all rows.
    """

    window_k: Tensor
    window_v: Tensor
    columns: int | Tensor
    num: int
    size: int
    numbers: int | Tensor

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Keys ``[B, K, G, c, D]`` and values ``[B, K, G, c, Dv]``; beyond the window its last token is repeated."""
        return self._of(self.window_k), self._of(self.window_v)

    def _of(self, window: Tensor) -> Tensor:
        G, c, columns = self.num, self.size, self.columns
        if not isinstance(columns, Tensor):
            return window[:, :, columns : columns + G * c].unflatten(2, (G, c))
        column = (columns[..., None] + torch.arange(c, device=columns.device)).flatten(1).clamp(max=window.shape[2] - 1)
        B, K, _, D = window.shape
        return window.gather(2, column[:, None, :, None].expand(B, K, -1, D)).unflatten(2, (G, c))


class SummarySpans(NamedTuple):
    """Queries whose means are summaries: span j holds positions ``[start + stride * j, start + stride * j + size)``.

    start: first position of span 0. Positions below 0 do not count. before, after: real tokens of the row before and
    after the new queries are read. num: number of spans G >= 1.
    """

    start: PerRow
    before: PerRow
    after: PerRow
    num: int
    size: int
    stride: int

    def int_if_equal(self) -> tuple[int, int, int] | None:
        """start, before and after if they are the same in all rows."""
        start, before, after = (int_if_equal(x) for x in self[:3])
        if isinstance(start, Tensor) or isinstance(before, Tensor) or isinstance(after, Tensor):
            return None
        return start, before, after

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """start, before and after of each row, int64 CPU ``[B]``."""
        return as_rows(self.start, num_rows), as_rows(self.before, num_rows), as_rows(self.after, num_rows)


class SummaryColumns(NamedTuple):
    """Queries whose means are summaries, in one row of packed documents: span j holds columns ``[lo[j], hi[j])`` of q.

    lo, hi: int64 ``[G]`` on the device of q, hi > lo; neither ever decreases. size: the most columns in any span.
    """

    lo: Tensor
    hi: Tensor
    size: int

    @property
    def num(self) -> int:
        """Number of spans G."""
        return self.lo.shape[0]


class AttendOptions(NamedTuple):
    """Options of attention. scale: factor of the scores. softcap: as in `Extras`. dropout_p: of attention's weights.

    return_lse: whether the log-sum-exp is wanted.
    """

    scale: float
    softcap: float = 0.0
    dropout_p: float = 0.0
    return_lse: bool = False


class Problem(NamedTuple):
    """The properties of a call for which backends have limits.

    widths: of keys and values. rows, heads: of q; 0 if the rows are not known. kv_heads: of k. softcap: see `Extras`.
    """

    device: torch.device
    dtype: torch.dtype
    widths: tuple[int, ...]
    num_queries: int = 2
    dropout_p: float = 0.0
    rows: int = 0
    heads: int = 1
    kv_heads: int = 1
    num_sources: int = 2
    softcap: float = 0.0

    @property
    def ratio(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


class Extras(NamedTuple):
    """Additions of a model to attention; by default none.

    softcap: scaled scores s become ``softcap * tanh(s / softcap)`` before biases are added (Gemma 2), 0.0 for none.
    sink_logits: float ``[H]``: each head's softmax also has this logit, which has no value, so the weights of the keys
    sum up to less than 1 (GPT-OSS); it gets a gradient. None for none.
    """

    softcap: float = 0.0
    sink_logits: Tensor | None = None

    @property
    def needs_lse(self) -> bool:
        """True if `finish` needs the log-sum-exp."""
        return self.sink_logits is not None

    def finish(self, out: Tensor, lse: Tensor | None) -> Tensor:
        """Add sink logits to an output ``[B, H, L, Dv]`` without them. lse: its log-sum-exp ``[B, H, L]``.

        With a sink logit z every key has ``exp(lse - logaddexp(lse, z))`` times the weight that it has without.
        """
        if self.sink_logits is None:
            return out
        assert lse is not None
        weight = torch.sigmoid(lse - self.sink_logits.to(lse.dtype)[:, None])
        return (out * weight[..., None]).to(out.dtype)


def soft_cap(scores: Tensor, softcap: float) -> Tensor:
    """``softcap * tanh(scores / softcap)``; for 0.0 the scores as they are."""
    return scores if softcap == 0.0 else torch.tanh(scores / softcap) * softcap


NO_EXTRAS = Extras()
