"""The up-projections of multi-head latent attention (MLA): latents as keys and values of heads, or queries on latents.

Shapes: B rows, H heads, L queries, S entries and tokens, d_c latent width, d_n, d_r, d_v widths of a head's parts: key
and query without position, key and query with position, value.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.spans import Source


class Ranks(NamedTuple):
    """The processes over which the heads of a layer are spread equally; each process has all latents.

    heads: number of heads of all processes. sum, max: reduce a tensor over all processes, number by number. All
    processes call these in the same order, with one shape, and get the same bits.
    """

    heads: int
    sum: Callable[[Tensor], Tensor]
    max: Callable[[Tensor], Tensor]


class UpProjection(NamedTuple):
    """The matrices that expand latents to heads' keys and values: w_uk ``[H, d_c, d_n]``, w_uv ``[H, d_c, d_v]``."""

    w_uk: Tensor
    w_uv: Tensor

    @property
    def latent_width(self) -> int:
        """Columns of a latent, d_c."""
        return self.w_uk.shape[1]

    def expand(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[c W_UK ; k_rope]`` ``[B, H, S, d_n + d_r]`` and values ``c W_UV`` ``[B, H, S, d_v]`` of entries."""
        H, d_c, _ = self.w_uk.shape
        c, k_rope = entries[:, 0, :, :d_c], entries[..., d_c:]
        # one product for all heads: a batched product per head would first copy the latents H times
        k_nope, v = (
            (c @ w.transpose(0, 1).flatten(1)).unflatten(-1, (H, -1)).transpose(1, 2) for w in (self.w_uk, self.w_uv)
        )
        return torch.cat([k_nope, k_rope.expand(-1, H, -1, -1)], dim=-1), v

    def absorb(self, q: Tensor) -> Tensor:
        """Queries on latents ``[q_nope W_UK^T ; q_rope]`` ``[B, H, L, d_c + d_r]`` from q ``[B, H, L, d_n + d_r]``."""
        d_n = self.w_uk.shape[2]
        return torch.cat([torch.einsum("bhln,hcn->bhlc", q[..., :d_n], self.w_uk), q[..., d_n:]], dim=-1)

    def project_out(self, out: Tensor) -> Tensor:
        """Outputs of heads ``[B, H, L, d_v]`` from their attention output on latents ``[B, H, L, d_c]``."""
        return torch.einsum("bhlc,hcv->bhlv", out, self.w_uv)

    def view(self, source: Source, absorb: bool) -> Source:
        """A source of latents ``[B, 1, S, d_c + d_r]`` for absorbed queries (``absorb``), or expanded for all heads."""
        if absorb:
            return source._replace(v=source.k[..., : self.latent_width])
        # entries that no query sees have width 0
        return Source(*self.expand(source.k), source.bias) if source.k.shape[3] > 0 else source

    def absorbing_pays(self, L: int, S: int) -> bool:
        """True if absorbing takes fewer multiplications for L queries over S keys, of which L are expanded anyway.

        Absorbed, a query costs ``2 d_c`` per key instead of ``d_n + d_v`` (rope apart), and no key is expanded.
        """
        d_c, heads = self.latent_width, self.w_uk.shape[2] + self.w_uv.shape[2]
        return (S - L) * d_c * heads > L * S * (2 * d_c - heads) + L * d_c * heads

    def mean_queries(self, q: Tensor, ranks: Ranks | None = None) -> Tensor:
        """Mean over heads of queries on latents, ``[B, 1, L, d_c + d_r]`` of q ``[B, H, L, d_n + d_r]``, in its dtype.

        Its product with ``[c ; k_rope]`` is the mean over heads of each head's score, without expanding a key.
        ranks: for heads spread over processes; sums are taken in float32 or wider, so that all processes compute the
        same scores and anchors.
        """
        H, _, d_n = self.w_uk.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        # One matrix product sums over heads and channels, in float32 or wider, and rounds to the dtype of q. Queries
        # are divided first, by a power of two >= H (exact), so that the sum does not overflow that dtype.
        divisor = 2 ** (H - 1).bit_length()
        total = (q[..., :d_n] / divisor).transpose(1, 2).flatten(2) @ self.w_uk.mT.flatten(0, 1)
        total = torch.cat([total.to(wide) * divisor, q[..., d_n:].sum(1, dtype=wide)], dim=-1)
        if ranks is not None:
            total, H = ranks.sum(total), ranks.heads
        return (total / H).to(q.dtype)[:, None]
