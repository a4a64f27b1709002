"""Sequences that are read over a pool of pages, and their attention as whole ones.

Shapes: R requests, H query heads, K KV heads, L tokens, D and Dv widths; a shape is H, K, D, Dv.
"""

import torch
from oracles import oracle

import condense


def random_tokens(shape, length, *, seed=0, dtype=torch.float64, device="cpu"):
    """q, k, v, packed: ``[L, heads, width]``."""
    H, K, D, Dv = shape
    return [x[0].transpose(0, 1).to(device, dtype) for x in oracle.random_qkv(1, H, K, length, D, Dv, seed=seed)]


def whole(qkv, method, scale, singles=()):
    """Attention of a whole sequence by the definition, ``[L, H, Dv]``. singles: positions that are read one by one."""
    rows = [x.transpose(0, 1)[None] for x in qkv]

    def by(method):
        return condense.attention(*rows, method=method, scale=scale, backend="reference")[0].transpose(0, 1)

    out = by(method)
    if method.reads_exactly and singles:
        out[singles] = by(method.replace(prompt="recall"))[singles]
    return out


def cut(qkv, start, stop):
    return [x[start:stop] for x in qkv]


def read_in_pieces(pool, qkv, piece, *, scale, backend):
    """A sequence read ``piece`` tokens at a time, ``[L, H, Dv]``."""
    length = len(qkv[0])
    request = pool.add(length)
    pieces = (cut(qkv, i, i + piece) for i in range(0, length, piece))
    return torch.cat([pool.read([(request, x)], scale=scale, backend=backend)[0] for x in pieces])


def run(pool, shape, lengths, steps, backend):
    """Prompts of different lengths, then single tokens of all requests: outputs of these, ``[steps, R, H, Dv]``."""
    options = {"dtype": pool.dtype, "device": pool.cache.device}
    qkvs = [random_tokens(shape, length + steps, seed=seed, **options) for seed, length in enumerate(lengths)]
    requests, scale, outs = [pool.add(length + steps) for length in lengths], shape[2] ** -0.5, []
    for request, qkv, length in zip(requests, qkvs, lengths, strict=True):
        if length:
            pool.read([(request, cut(qkv, 0, length))], scale=scale, backend="torch")
    for _ in range(steps):
        chunks = [(r, cut(qkv, r.seen, r.seen + 1)) for r, qkv in zip(requests, qkvs, strict=True)]
        outs.append(torch.cat(pool.read(chunks, scale=scale, backend=backend)))
    return torch.stack(outs)


def exact(shape, method, dtype, lengths, steps):
    """What `run` computes, in float64, by the definition of attention over whole sequences."""
    rows = []
    for seed, length in enumerate(lengths):
        qkv = [x.double() for x in random_tokens(shape, length + steps, seed=seed, dtype=dtype)]
        rows.append(whole(qkv, method, shape[2] ** -0.5, range(length, length + steps))[length:])
    return torch.stack(rows, dim=1)
