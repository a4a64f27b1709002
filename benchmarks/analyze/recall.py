"""The share of dense attention that Recall sees exactly in each layer, and how often a group is opened again.

Shapes: B = 1 row, H query heads, K KV heads, L tokens, Q sampled queries, G groups of g tokens, D width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from analyze.deviation import observe, stretches
from condense.caches import CondensedLayer, ReadRequest
from condense.config import check_int
from condense.methods import Context, Recall
from condense.models import attention_layers, check_stock, use
from condense.models.families import is_latent
from condense.ops.recall import GroupIndex, IndexChoice
from condense.ops.tensors.per_row import max_row
from condense.state import num_entries


@dataclass(frozen=True)
class LayerRecall:
    """One layer, over the sampled queries of all texts.

    window, opened, pooled: the shares of dense attention's weights that lie on the window, on the tokens of open groups
    and on the others, means over heads; they add up to 1. best: the value that ``opened`` would have if the groups with
    the largest weights were opened. heads: ``window + opened`` of each query head.
    hits: for each number of slots the share of opened groups that are in a slot already when a token opens them.
    """

    layer: int
    window: float
    opened: float
    pooled: float
    best: float
    heads: tuple[float, ...]
    hits: Mapping[int, float]


@torch.no_grad()
def measure_recall(
    model: PreTrainedModel,
    method: Recall,
    texts: Sequence[Tensor],
    length: int,
    *,
    sequences: int = 1,
    steps: int = 128,
    slots: Sequence[int] | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> list[LayerRecall]:
    """Shares of dense attention's weights and hit rates of slots, in each layer of a model that reads with ``method``.

    model: a causal LM with stock attention, which it has afterwards too, and ordinary keys. texts: token ids ``[n]``,
    from which up to ``sequences`` stretches of ``length`` tokens are cut. steps: the queries of this many last tokens
    of a stretch are measured, one after the other. slots: numbers of slots per KV head to try; None: one, two and four
    times as many as the last token opens groups. on_step is called after every stretch.
    Raises ValueError for another method, a model with latents or one that is condensed already, a length at which no
    group is closed for the measured queries or that exceeds the texts, and counts below 1.
    """
    for name, number in (("sequences", sequences), ("steps", steps)):
        check_int(name, number, 1)
    if not isinstance(method, Recall):
        raise ValueError(f"method must be condense.Recall, got {method}")
    check_stock(model)
    if any(map(is_latent, attention_layers(model).values())):
        raise ValueError(f"{type(model).__name__} has latents (MLA), whose weights are not measured")
    if length <= steps or method.layout.rule.closed(length - steps + 1) < 1:
        raise ValueError(
            f"length must be such that {method} closes a group before the last {steps} tokens, got {length}"
        )
    parts = [part for ids in texts for part in stretches(ids, length, sequences)]
    if not parts:
        raise ValueError(
            f"length must be at most that of the longest text, {max(map(len, texts), default=0)}, got {length}"
        )
    opened = method.num_recall
    if isinstance(opened, float):
        opened = method.quota.at(max_row(num_entries(method, length)))
    sizes = tuple(slots or (n * opened for n in (1, 2, 4)))
    with use(model, {"rest": method}):
        observers = observe(model, lambda module: _Observer(method, module, steps, sizes), parts, on_step)
    return [layer.report(i) for i, layer in observers.items()]


class _Observer(CondensedLayer):
    """A cache layer that looks at the last queries of the text that it reads, in one forward."""

    def __init__(self, method: Recall, module: nn.Module, steps: int, slots: tuple[int, ...]) -> None:
        super().__init__(method)
        self.recall, self.module, self.steps = method, module, steps
        self._shares: list[Tensor] = []
        self._hits = dict.fromkeys(slots, 0)
        self._opened = 0

    def read(self, k: Tensor, v: Tensor, request: ReadRequest) -> Context:
        """Read as the base class and measure; ``k`` is the whole text."""
        context = super().read(k, v, request)
        L = k.shape[2]
        q = request.q[:, :, L - self.steps :]
        closed = context.spans.at(L - self.steps, L, k.device)[0].hi
        index = GroupIndex(*context.extra[:2])
        choice = IndexChoice(q, index, request.scale, self.recall.quota)
        opened = choice.at(0, self.steps, closed, index.signs.shape[2])
        self._shares.append(_shares(q, k, opened, closed[0, 0], self.recall.group_size, request.scale))
        for head in opened[0].cpu():
            self._count_hits([row.nonzero()[:, 0].tolist() for row in head])
        return context

    def _count_hits(self, opened: list[list[int]]) -> None:
        """Count how many of the groups that one KV head opens, token by token, are in slots; least recently used go."""
        self._opened += sum(map(len, opened[1:]))
        for size in self._hits:
            held: OrderedDict[int, None] = OrderedDict()
            for step, groups in enumerate(opened):
                self._hits[size] += sum(group in held for group in groups) if step > 0 else 0
                for group in groups:
                    held.pop(group, None)
                    held[group] = None
                while len(held) > size:
                    held.popitem(last=False)

    def report(self, layer: int) -> LayerRecall:
        """The layer's figures over all texts."""
        shares = torch.cat(self._shares, dim=2).double().mean(2)
        window, opened, pooled, best = shares.mean(1).tolist()
        heads = tuple((shares[0] + shares[1]).tolist())
        hits = {size: hits / max(1, self._opened) for size, hits in self._hits.items()}
        return LayerRecall(layer, window, opened, pooled, best, heads, hits)


def _shares(q: Tensor, k: Tensor, opened: Tensor, closed: Tensor, g: int, scale: float) -> Tensor:
    """Dense attention's weights on window, open groups, other groups and best groups, ``[4, H, Q]`` on the CPU.

    q ``[1, H, Q, D]`` are the last queries of k ``[1, K, L, D]``; opened bool ``[1, K, Q, G]``; closed int64 ``[Q]``.
    """
    (_, H, Q, _), (K, L, G) = q.shape, (k.shape[1], k.shape[2], opened.shape[3])
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scale * (q[0].to(wide).unflatten(0, (K, -1)) @ k[0].to(wide)[:, None].mT)
    token = torch.arange(L, device=k.device)
    future = token > torch.arange(L - Q, L, device=k.device)[:, None]
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    of_groups = weights[..., : G * g].unflatten(3, (G, g)).sum(-1)
    of_groups = of_groups * (torch.arange(G, device=k.device) < closed[:, None])
    in_groups = of_groups.sum(-1)
    open_ = (of_groups * opened[0, :, None]).sum(-1)
    most = int(opened.sum(-1).max())
    # query heads that share a KV head open the same groups: those with the largest weights of any of them
    wanted = of_groups.amax(1, keepdim=True).topk(most, dim=-1).indices.expand(-1, H // K, -1, -1)
    best = of_groups.gather(-1, wanted).sum(-1)
    return torch.stack([1 - in_groups, open_, in_groups - open_, best]).flatten(1, 2).cpu()
