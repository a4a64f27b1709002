"""Recall on one head, token by token: the whole method, without caches, padding, batches or kernels.

`python docs/recall_in_100_lines.py` compares it with `condense.attention`; docs/methods.md defines the method.
Shapes: L tokens, groups of g tokens, N tokens that a query sees, D and Dv widths of keys and values.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

import condense
from condense.ops.recall import block_width, rotation


class Settings(NamedTuple):
    """The settings of `condense.Recall` that say who sees what, small enough for a text of a hundred tokens."""

    group_size: int = 4  # tokens per group, g
    window: int = 8  # number of newest tokens, which are always seen exactly
    num_recall: int = 3  # number of groups that a query opens


class Group(NamedTuple):
    """All that is kept of a closed group. A cache may move k and v, the largest part, to host memory."""

    k: Tensor  # the exact tokens [g, D] and [g, Dv], read only when a query opens the group
    v: Tensor
    centre: Tensor  # the index: the mean [D] of the rotated keys, in 4 bits; for each key's difference from it:
    signs: Tensor  # its signs [g, D], 1 or -1
    steps: Tensor  # and one size [g] per key for all its signs


def close(k: Tensor, v: Tensor) -> Group:
    """Make a group of its tokens k ``[g, D]`` and v ``[g, Dv]``, once they have left the window."""
    # the rotation keeps scores and makes a key's numbers similar in size, so their signs hold most of the key
    rotated = k @ rotation(k.shape[1], k.device).double()
    mean, P = rotated.mean(0), block_width(k.shape[1])
    digits, power = torch.frexp(mean.abs().max() / 15)
    unit = torch.ldexp((16 * digits).ceil() / 16, power)
    rest = rotated - (centre := unit * (2 * (mean / (2 * unit) + 8).floor().clamp(0, 15) - 15))
    return Group(k, v, centre / P, rest.sign(), rest.square().sum(1) / rest.abs().sum(1) / P)


def score(q: Tensor, group: Group, scale: float) -> tuple[Tensor, Tensor]:
    """Score a group for a query ``[D]`` by its index alone: its centre, and the largest of its tokens, estimated."""
    rotated = q @ rotation(len(q), q.device).double()
    rotated = (rotated / (unit := rotated.abs().max() / 127)).round()  # to 8 bits
    centre = group.centre @ rotated
    return scale * unit * centre, scale * unit * (centre + (group.signs @ rotated * group.steps).max())


def attend(scores: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention ``[Dv]`` of one query: one softmax over N tokens, of which the lists hold parts."""
    return torch.cat(scores).softmax(0) @ torch.cat(values)


def recall(q: Tensor, k: Tensor, v: Tensor, settings: Settings, scale: float) -> Tensor:
    """Read tokens q and k ``[L, D]``, v ``[L, Dv]`` one after another and return their attention ``[L, Dv]``."""
    g = settings.group_size
    groups: list[Group] = []
    total, outputs = torch.zeros_like(v[0]), []
    for t in range(len(q)):
        # sum: the values of all whole groups so far, be they closed or not
        whole = (t + 1) // g * g
        if whole == t + 1:
            total = total + v[whole - g : whole].sum(0)
        # close: a group closes when its last token has left the window; after that it never changes
        if max(0, t + 1 - settings.window) // g > len(groups):
            tokens = slice(len(groups) * g, (len(groups) + 1) * g)
            groups.append(close(k[tokens], v[tokens]))
        # choose: reads the index only, no tokens of groups; the highest scores, ties to the older group
        centres, best = zip(*[score(q[t], group, scale) for group in groups], strict=True) if groups else ((), ())
        ranked = sorted(range(len(groups)), key=lambda j: (-best[j], j))
        opened, others = ranked[: settings.num_recall], ranked[settings.num_recall :]
        # attend: each past token counts once: itself, or in the one token that stands for all groups that are not open
        first = len(groups) * g
        scores = [scale * x @ q[t] for x in (k[first : t + 1], *(groups[j].k for j in opened))]
        values = [v[first : t + 1], *(groups[j].v for j in opened)]
        if others:
            weight = torch.stack([centres[j] for j in others]).logsumexp(0) + math.log(g)
            scores, values = [*scores, weight[None]], [*values, total[None] / whole]
        outputs.append(attend(scores, values))
    return torch.stack(outputs)


def compare(settings: Settings, length: int = 100, width: int = 16) -> float:
    """Largest difference from `condense.attention` on random tokens of one head."""
    random, scale = torch.Generator().manual_seed(0), width**-0.5
    q, k, v = torch.randn(3, length, width, dtype=torch.float64, generator=random).unbind()
    method = condense.Recall(**settings._asdict())
    library = condense.attention(*(x[None, None] for x in (q, k, v)), method=method, scale=scale)[0, 0]
    return float((recall(q, k, v, settings, scale) - library).abs().max())


if __name__ == "__main__":
    print(f"largest difference from condense.attention: {compare(Settings()):.1e}")
