"""Handing out methods: from the most faithful one in every layer to the smallest, at the least loss per byte saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def greedy_path(costs: Mapping[int, Sequence[float]], sizes: Mapping[int, Sequence[int]]) -> list[dict[int, int]]:
    """Allocations (layer to the number of its candidate), each smaller in one layer than the one before.

    costs, sizes: per layer, of each candidate: what it loses and what it keeps. The first allocation has in every layer
    the candidate that loses least, the smallest one among equals. Each next one takes, of all smaller candidates in all
    layers, the one that loses least per byte saved; among equals the one that saves most, then the one in the lowest
    layer. So no candidate is taken that another beats in both.
    """
    path = [{layer: min(range(len(of)), key=lambda n: (of[n], sizes[layer][n])) for layer, of in costs.items()}]
    while True:
        steps = []
        for layer, now in path[-1].items():
            of, size = costs[layer], sizes[layer]
            smaller = (n for n in range(len(of)) if size[n] < size[now])
            steps += [((of[n] - of[now]) / (size[now] - size[n]), size[n] - size[now], layer, n) for n in smaller]
        if not steps:
            return path
        _, _, layer, number = min(steps)
        path.append(path[-1] | {layer: number})
