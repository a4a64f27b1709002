"""Condensed multi-head latent attention (MLA): pool latents, attend through the up-projections.

A token is cached as one vector ``[c ; k_rope]``, shared by all heads. `condense.functional.extend` reads it as the key
of a single KV head; the value is a part of that key, so the value tensor has width 0. Attention then either expands
keys and values per head or absorbs the up-projections into queries and outputs.

Shapes: B rows, H heads, L new tokens, S entries and tokens, d_c latent width, d_n, d_r, d_v widths of a head's parts:
key and query without position, key and query with position, value.
"""

from typing import Any

import torch
from torch import Tensor

from condense.functional import extend
from condense.methods import Context, Method
from condense.methods.checks import attend_checked
from condense.ops import Source
from condense.ops.checks import check_alike, check_scale, check_shapes
from condense.ops.latents import Ranks, UpProjection
from condense.ops.tensors.autocast import outside_autocast
from condense.plan import ForwardPlan, run_planned


def latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    c: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    method: Method,
    scale: float | None = None,
    backend: str = "auto",
    cu_seqlens: Tensor | None = None,
    padding: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Condensed causal MLA of whole sequences, on latents (Latent-Condensed Attention, section 4).

    q_nope ``[B, H, L, d_n]``, q_rope ``[B, H, L, d_r]``; c ``[B, L, d_c]``, the latents after their norm; k_rope ``[B,
    L, d_r]``; both rope parts rotated already. w_uk ``[H, d_c, d_n]``, w_uv ``[H, d_c, d_v]``: head h has keys ``[c
    w_uk[h] ; k_rope]`` and values ``c w_uv[h]``. From a model's ``kv_b_proj.weight``, seen as ``[H, d_n + d_v, d_c]``:
    ``weight[:, :d_n].mT`` and ``weight[:, d_n:].mT``. One dtype and device for all.
    method: `condense.LCA` and `condense.CCA` pool latents by value_pooling and rope keys by key_pooling; `condense.DGA`
    keeps and weighs whole entries ``[c ; k_rope]``, with ``selection="streaming"`` only.
    scale: softmax scale, default ``(d_n + d_r) ** -0.5``; models with YaRN have their own.
    backend, cu_seqlens, padding and what is returned: as in `condense.attention`; out is ``[B, H, L, d_v]``.
    Differentiable in all six tensors. Raises ValueError for arguments that do not fit together, and
    for a device without float64 (MPS).
    """
    tensors = q_nope, q_rope, c, k_rope, w_uk, w_uv
    check_shapes(
        q_nope=(q_nope, "batch heads tokens d_n"), q_rope=(q_rope, "batch heads tokens d_r?"),
        c=(c, "batch tokens d_c"), k_rope=(k_rope, "batch tokens d_r?"),
        w_uk=(w_uk, "heads d_c d_n"), w_uv=(w_uv, "heads d_c d_v"),
    )  # fmt: skip
    method = Method.parse(method)
    with outside_autocast(*tensors) as (q_nope, q_rope, c, k_rope, w_uk, w_uv):
        check_alike(q_nope=q_nope, q_rope=q_rope, c=c, k_rope=k_rope, w_uk=w_uk, w_uv=w_uv)
        q, up = torch.cat([q_nope, q_rope], dim=-1), UpProjection(w_uk, w_uv)
        scale = check_scale(scale, q)
        latent_method = method.for_latents(c.shape[-1])

        def run(q: Tensor, entries: Tensor, plan: ForwardPlan) -> tuple[Tensor, Tensor | None]:
            mean_q, values = mean_queries(method, q, up), entries[..., :0]
            context, _ = extend(latent_method, None, mean_q, entries, values, scale=scale, plan=plan, backend=backend)
            options = {"scale": scale, "backend": backend, "return_lse": return_lse}
            return attend_latents(method, q, context, up, new=None, **options)

        entries = torch.cat([c, k_rope], dim=-1)[:, None]
        out, lse = run_planned(method, run, (q, entries), cu_seqlens, padding)
    return out if lse is None else (out, lse)


def mean_queries(method: Method, q: Tensor, up: UpProjection, ranks: Ranks | None = None) -> Tensor:
    """The queries that summary queries are means of (`UpProjection.mean_queries`); of width 0 if none are needed."""
    return q[:, :1, :, :0] if method.layout.num_summary == 0 else up.mean_queries(q, ranks)


def attend_latents(
    method: Method, q: Tensor, context: Context, up: UpProjection, *, new: tuple[Tensor, Tensor] | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`Method.attend` of q ``[B, H, L, d_n + d_r]`` over a context of latents: out ``[B, H, L, d_v]``, and lse or None.

    It attends on latents, or on keys and values per head, whichever is cheaper.
    context: as `condense.functional.extend` returns it. new: keys and values per head of the window's last L tokens, if
    the caller has expanded them already, else None. options: of `Method.attend`.
    """
    (*entries, window), context = context.sources, context._replace(is_latent=True)
    # stored tokens are latents too, and would be expanded with the others
    lengths = [x.shape[2] for x in (*(x.k for x in context.sources), *context.extra[2:]) if x.shape[3] > 0]
    if up.absorbing_pays(q.shape[2], sum(lengths)):
        latents = tuple(up.view(source, absorb=True) for source in context.sources)
        out, lse = attend_checked(method, up.absorb(q), context._replace(sources=latents), **options)
        return up.project_out(out), lse
    of_entries = [up.view(source, absorb=False) for source in entries]
    if new is None:
        expanded = up.expand(window.k)
    elif (before := window.k.shape[2] - new[0].shape[2]) == 0:
        expanded = new
    else:
        k, v = up.expand(window.k[:, :, :before])
        expanded = torch.cat([k, new[0]], dim=2), torch.cat([v, new[1]], dim=2)
    context = context._replace(sources=(*of_entries, Source(*expanded)), projection=up)
    return attend_checked(method, q, context, **options)
