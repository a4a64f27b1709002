"""Recall on one head, token by token: the whole method, without caches, padding, batches or kernels.

`python docs/recall_in_100_lines.py` compares it with `condense.attention`; docs/methods.md defines the method.
Shapes: L tokens, groups of g tokens, N keys that a query sees, D and Dv widths of keys and values.
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
    entry_k: Tensor  # one key [D] and one value [Dv], seen instead of the tokens if the group is not open
    entry_v: Tensor
    centre: Tensor  # the index: the mean [D] of the rotated keys, in 4 bits; for each key's difference from it:
    signs: Tensor  # its signs [g, D], 1 or -1
    steps: Tensor  # and one size [g] per key for all its signs


def close(k: Tensor, v: Tensor) -> Group:
    """Make a group of its tokens k ``[g, D]`` and v ``[g, Dv]``, once they have left the window."""
    # the rotation keeps scores and makes a key's numbers similar in size, so their signs hold most of the key
    turned = k @ rotation(k.shape[1], k.device).double()
    mean, P = turned.mean(0), block_width(k.shape[1])
    digits, power = torch.frexp(mean.abs().max() / 15)
    unit = torch.ldexp((16 * digits).ceil() / 16, power)
    rest = turned - (centre := unit * (2 * (mean / (2 * unit) + 8).floor().clamp(0, 15) - 15))
    return Group(k, v, k.mean(0), v.mean(0), centre / P, rest.sign(), rest.square().sum(1) / rest.abs().sum(1) / P)


def score(q: Tensor, group: Group, scale: float) -> Tensor:
    """Estimate the largest score of a group's tokens for a query ``[D]``, from the group's index alone."""
    turned = q @ rotation(len(q), q.device).double()
    turned = (turned / (unit := turned.abs().max() / 127)).round()  # to 8 bits
    return scale * unit * (group.centre @ turned + (group.signs @ turned * group.steps).max())


def choose(q: Tensor, groups: list[Group], settings: Settings, scale: float) -> set[int]:
    """Choose the groups to open: those with the highest scores, ties to the older."""
    scores = [float(score(q, group, scale)) for group in groups]
    return set(sorted(range(len(groups)), key=lambda j: (-scores[j], j))[: settings.num_recall])


def attend(q: Tensor, keys: Tensor, values: Tensor, biases: Tensor, scale: float) -> Tensor:
    """Attention ``[Dv]`` of one query ``[D]``: one softmax over N keys, whatever they stand for."""
    return (scale * keys @ q + biases).softmax(0) @ values


def recall(q: Tensor, k: Tensor, v: Tensor, settings: Settings, scale: float) -> Tensor:
    """Read tokens q and k ``[L, D]``, v ``[L, Dv]`` one after another and return their attention ``[L, Dv]``."""
    g = settings.group_size
    groups: list[Group] = []
    outputs = []
    for t in range(len(q)):
        # close: a group closes when its last token has left the window; after that it never changes
        if max(0, t + 1 - settings.window) // g > len(groups):
            tokens = slice(len(groups) * g, (len(groups) + 1) * g)
            groups.append(close(k[tokens], v[tokens]))
        # choose: reads the index only, no tokens of groups
        opened = choose(q[t], groups, settings, scale)
        # attend: each past token counts once: itself, or in its group's entry, which weighs as much as g tokens
        first = len(groups) * g
        keys, values, biases = list(k[first : t + 1]), list(v[first : t + 1]), [0.0] * (t + 1 - first)
        for j, group in enumerate(groups):
            if j in opened:
                keys, values, biases = [*keys, *group.k], [*values, *group.v], [*biases, *[0.0] * g]
            else:
                keys, values, biases = [*keys, group.entry_k], [*values, group.entry_v], [*biases, math.log(g)]
        outputs.append(attend(q[t], torch.stack(keys), torch.stack(values), q.new_tensor(biases), scale))
    return torch.stack(outputs)


def compare(settings: Settings, length: int = 100, width: int = 16) -> float:
    """Largest difference from `condense.attention` on random tokens of one head."""
    random, scale = torch.Generator().manual_seed(0), width**-0.5
    q, k, v = torch.randn(3, length, width, dtype=torch.float64, generator=random).unbind()
    method = condense.Recall(**settings._asdict(), unchosen="pool")
    library = condense.attention(*(x[None, None] for x in (q, k, v)), method=method, scale=scale)[0, 0]
    return float((recall(q, k, v, settings, scale) - library).abs().max())


if __name__ == "__main__":
    print(f"largest difference from condense.attention: {compare(Settings()):.1e}")
