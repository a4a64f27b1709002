"""Sequences that are read over a pool of pages, and their attention as whole ones. A shape is H, K, D, Dv."""

from functools import partial

import torch
from layers import read_whole
from oracles import latent_oracle, oracle

import condense
from condense.ops import NO_EXTRAS, Extras
from condense.ops.latents import Ranks, UpProjection


def random_tokens(shape, length, *, seed=0, dtype=torch.float64, device="cpu"):
    H, K, D, Dv = shape
    return [x[0].transpose(0, 1).to(device, dtype) for x in oracle.random_qkv(1, H, K, length, D, Dv, seed=seed)]


def random_extras(heads, *, softcap=0.0, dtype=torch.float64, device="cpu"):
    """Sink logits about as large as the scores."""
    drawn = torch.randn(heads, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Extras(softcap, 2 * drawn.to(device, dtype))


def whole(qkv, method, scale, singles=(), up=None, extras=NO_EXTRAS):
    """By the definition, ``[L, H, Dv]``. singles: positions read one by one. up: the up-projections of latents."""
    rows = [x.transpose(0, 1)[None] for x in qkv]
    if up is not None:
        (d_c, d_n), q, k = up.w_uk.shape[1:], rows[0], rows[1][:, 0]
        parts = q[..., :d_n], q[..., d_n:], k[..., :d_c], k[..., d_c:], *up
        return condense.latent_attention(*parts, method=method, scale=scale, backend="reference")[0].transpose(0, 1)

    def by(method):
        context = read_whole(method, *rows, scale=scale, backend="reference")
        out, _ = method.attend(rows[0], context, scale=scale, backend="reference", extras=extras)
        return out[0].transpose(0, 1)

    out = by(method)
    if method.as_steps is not method and singles:
        out[singles] = by(method.replace(prompt="recall"))[singles]
    return out


def random_latents(heads, widths, length, *, seed=0, dtype=torch.float64, device="cpu"):
    """q ``[L, H, d_n + d_r]``, k ``[L, 1, d_c + d_r]``, v ``[L, 1, 0]``; and the up-projections, the same for all."""
    x = latent_oracle.random(1, heads, length, widths, dtype, seed=seed)
    k = torch.cat([x.c, x.k_rope], -1)[0, :, None].to(device)
    q = torch.cat([x.q_nope, x.q_rope], -1)[0].transpose(0, 1).to(device)
    fixed = latent_oracle.random(1, heads, 1, widths, dtype, seed=0)
    return [q, k, k[..., :0]], UpProjection(fixed.w_uk.to(device), fixed.w_uv.to(device))


def cut(qkv, start, stop):
    return [x[start:stop] for x in qkv]


def read_in_pieces(pool, qkv, piece, *, scale, backend):
    length = len(qkv[0])
    request = pool.add(length)
    pieces = (cut(qkv, i, i + piece) for i in range(0, length, piece))
    return torch.cat([pool.read([(request, x)], scale=scale, backend=backend)[0] for x in pieces])


def on_two_ranks(make, heads, read):
    """Outputs ``[..., heads, width]`` of ``read(pool)`` on two ranks, each with half of the heads and its own pool.

    What a rank says to others follows from its queries and keys alone, not from what it hears: so each reads first by
    itself and is written down, and then hears both.
    """
    halves, said = (slice(heads // 2), slice(heads // 2, heads)), ([], [])

    def read_half(half, exchange):
        pool = make()
        pool.heads, pool.ranks = half, Ranks(heads, partial(exchange, torch.add), partial(exchange, torch.maximum))
        return read(pool)

    def say(mine, reduce, x):
        mine.append(x)
        return x

    def hear(exchanged, reduce, x):
        return reduce(*next(exchanged))

    for half, mine in zip(halves, said, strict=True):
        read_half(half, partial(say, mine))
    return torch.cat([read_half(half, partial(hear, zip(*said, strict=True))) for half in halves], dim=-2)


def run(*args):
    return torch.stack(list(run_steps(*args)))


def run_steps(pool, shape, lengths, steps, backend, prompts="torch"):
    """Prompts, read by the backend ``prompts``, then single tokens of all requests: yields outputs ``[R, H, Dv]``."""
    options = {"dtype": pool.dtype, "device": pool.blocks.device}
    qkvs, pool.up = _sequences(shape, lengths, steps, **options)
    requests, scale = [pool.add(length + steps) for length in lengths], _scale_of(shape)
    for request, qkv, length in zip(requests, qkvs, lengths, strict=True):
        if length:
            pool.read([(request, cut(qkv, 0, length))], scale=scale, backend=prompts)
    for _ in range(steps):
        chunks = [(r, cut(qkv, r.seen, r.seen + 1)) for r, qkv in zip(requests, qkvs, strict=True)]
        yield torch.cat(pool.read(chunks, scale=scale, backend=backend))


def exact(shape, method, dtype, lengths, steps, extras=NO_EXTRAS):
    """What `run` computes, in float64, by the definition of attention over whole sequences."""
    qkvs, up = _sequences(shape, lengths, steps, dtype=dtype)
    up, rows = None if up is None else UpProjection(*(w.double() for w in up)), []
    for qkv, length in zip(qkvs, lengths, strict=True):
        singles = range(length, length + steps)
        rows.append(whole([x.double() for x in qkv], method, _scale_of(shape), singles, up, extras)[length:])
    return torch.stack(rows, dim=1)


def _scale_of(shape):
    return (shape[2] if len(shape) == 4 else sum(shape[1][:2])) ** -0.5


def _sequences(shape, lengths, steps, **options):
    if len(shape) == 4:
        return [random_tokens(shape, n + steps, seed=seed, **options) for seed, n in enumerate(lengths)], None
    made = [random_latents(*shape, n + steps, seed=seed, **options) for seed, n in enumerate(lengths)]
    return [qkv for qkv, _ in made], made[0][1]
