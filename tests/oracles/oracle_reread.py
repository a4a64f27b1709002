"""Reread by definition, of K KV heads, n tokens of a prompt, c of a piece: scores by transformers' eager attention."""

import math
from unittest import mock

import torch
from torch.nn import functional as F

_SOFTMAX = F.softmax


@torch.no_grad()
def scores(model, ids, method, heads):
    """Each layer's scores ``[K, n]`` of one prompt ``[n]``, by a stock model; heads: K of the cache."""
    n, result, own = len(ids), None, model.config._attn_implementation
    model.set_attn_implementation("eager")
    for a in range(0, n, method.piece):
        b = min(n, a + method.piece)
        c = b - a
        sees = torch.ones(n + c, n + c).tril().bool()
        for j in range(c):
            sees[n + j, :n] = False
            sees[n + j, : method.sink] = sees[n + j, a:b] = True
        mask = torch.zeros(n + c, n + c, dtype=model.dtype).masked_fill(~sees, -math.inf)[None, None]
        both = torch.cat([ids, ids[a:b]])[None]
        # transformers takes the softmax of a float64 model in float32
        with mock.patch.object(F, "softmax", lambda x, dim, dtype=None: _SOFTMAX(x, dim)):
            out = model(both, attention_mask=mask, output_attentions=True, use_cache=False)
        weights = [x[0, :, n:, :n].unflatten(0, (heads, -1)).amax((1, 2)) for x in out.attentions]
        result = weights if result is None else [torch.maximum(x, y) for x, y in zip(result, weights, strict=True)]
    model.set_attn_implementation(own)
    return result


def kept(method, layers):
    """The positions that each layer's heads keep, from scores ``[K, n]`` by layer."""
    n = layers[0].shape[1]
    rankings, places = [], []
    for number, heads in enumerate(layers):
        orders = []
        for head in heads.tolist():
            worth = [math.inf if i < method.sink or i >= n - method.window else head[i] for i in range(n)]
            orders.append(sorted(range(n), key=lambda i, worth=worth: (-worth[i], i)))
        rankings.append(orders)
        for place in range(n):
            forced = place < min(n, method.sink + method.window)
            mean = sum(head[order[place]] for head, order in zip(heads.tolist(), orders, strict=True)) / len(orders)
            places.append((-math.inf if forced else -mean, number, place))
    count = max(math.ceil(round(method.share * n, 9)), min(n, method.sink + method.window))
    best = sorted(places)[: len(layers) * count]
    sizes = [sum(layer == number for _, layer, _ in best) for number in range(len(layers))]
    return [[sorted(order[:size]) for order in orders] for orders, size in zip(rankings, sizes, strict=True)]
