"""Attention with what models add to it, by definition: the whole mask at once, the added logit a column of scores."""

import math

import torch
from layers import read_request, read_whole
from oracles import oracle

import condense
from condense.caches import StaticCondensedLayer
from condense.ops import Extras, NewToken
from condense.ops.reference.attend import visible

B, H, K, L, PROMPT = 2, 6, 2, 28, 22
# on a GPU widths that the kernels have
D, Dv = (64, 80) if torch.cuda.is_available() else (16, 24)
SCALE = 2 * D**-0.5
METHODS = {
    "cca": condense.CCA(group_size=4, window=9, rep_bias="log_size"),
    "matched": condense.CCA(group_size=4, window=9, rep_bias="matched"),
    "dense": condense.Dense(),
    "recall": condense.Recall(group_size=4, window=6, num_recall=2),
    "recall all": condense.Recall(group_size=4, window=6, num_recall=20),
}


def logits(seed=1):
    """Sink logits as large as the scores, some far smaller."""
    return torch.randn(H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def every_kind(dtype=torch.float64, device="cpu"):
    """Name -> extras; caps within the range of the scores, which reach 8."""
    z = logits().to(device, dtype)
    return {"sinks": Extras(sink_logits=z), "cap": Extras(softcap=3.0), "both": Extras(softcap=1.5, sink_logits=z)}


def qkv(dtype=torch.float64, device="cpu", length=L):
    return [x.to(device) for x in oracle.random_qkv(B, H, K, length, D, Dv, dtype=dtype)]


def context_of(method, q, k, v, backend="auto"):
    return read_whole(method, q, k, v, scale=SCALE, backend=backend)


def definition(context, q, extras):
    """Attention over sources with a tensor, a number or no bias each, ``[B, H, L, Dv]``."""
    k, v = (torch.cat([getattr(source, name) for source in context.sources], dim=2) for name in ("k", "v"))
    sizes = [source.k.shape[2] for source in context.sources]
    k, v = (x.repeat_interleave(H // K, dim=1) for x in (k, v))
    scores = q @ k.mT * SCALE
    if extras.softcap:
        scores = torch.tanh(scores / extras.softcap) * extras.softcap
    bias = [torch.as_tensor(0.0 if source.bias is None else source.bias, dtype=q.dtype) for source in context.sources]
    per_head = [x.expand(B, K, n) for n, x in zip(sizes, bias, strict=True)]
    scores = scores + torch.cat(per_head, dim=2).repeat_interleave(H // K, dim=1)[:, :, None]
    mask = visible(context.spans, 0, q.shape[2], sizes, q.device)
    scores = scores.masked_fill(~mask.repeat_interleave(H // mask.shape[1], dim=1), -math.inf)
    if extras.sink_logits is None:
        return scores.softmax(-1) @ v
    added = extras.sink_logits.expand(B, q.shape[2], H).mT[..., None]
    return torch.cat([scores, added], dim=-1).softmax(-1)[..., :-1] @ v


def steps(method, q, k, v, extras):
    """Outputs of a static layer that reads a prompt, then one token per row at a time."""
    layer = StaticCondensedLayer(method, q.shape[2])
    prompt = [x[:, :, :PROMPT] for x in (q, k, v)]
    context = layer.read(*prompt[1:], read_request(prompt[0], scale=SCALE))
    outs = [method.attend(prompt[0], context, scale=SCALE, extras=extras)[0]]
    later = zip(*(x[:, :, PROMPT:].split(1, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat([*outs, *(layer.step(NewToken(*new), scale=SCALE, extras=extras) for new in later)], dim=2)
