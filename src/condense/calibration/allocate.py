"""Handing out methods: from the most faithful one in every layer to the smallest, at the least loss per byte saved, and
what loses least in a given size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

_UNITS = 2**14  # `best_within` divides the bytes that are left into so many parts


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


def best_within(costs: Mapping[int, Sequence[float]], sizes: Mapping[int, Sequence[int]], room: int) -> dict[int, int]:
    """The allocation that loses least, of all that keep at most ``room`` bytes.

    costs, sizes: as of `greedy_path`; the smallest candidates must fit. By dynamic programming over the layers (the
    multiple-choice knapsack problem) in whole units: a 16,384th of what the smallest candidates leave over, to which
    everything beyond them is rounded up, so an allocation that fits by less may be missed. Among candidates of equal
    loss a layer gets the smaller one.
    """
    least = {layer: min(size) for layer, size in sizes.items()}
    unit = max(1, -(-(room - sum(least.values())) // _UNITS))
    units = (room - sum(least.values())) // unit
    lost = np.zeros(units + 1)  # lost[u]: the least that the layers so far lose, with at most u units
    taken = []
    for layer, of in costs.items():
        beyond = [-(-(size - least[layer]) // unit) for size in sizes[layer]]
        ways = np.full((len(of), units + 1), np.inf)
        order = sorted((n for n in range(len(of)) if beyond[n] <= units), key=lambda n: beyond[n])
        for row, n in enumerate(order):
            ways[row, beyond[n] :] = lost[: units + 1 - beyond[n]] + of[n]
        rows = ways.argmin(0)
        lost = ways[rows, np.arange(units + 1)]
        taken.append((layer, [(n, beyond[n]) for n in order], rows))
    allocation = {}
    for layer, candidates, rows in reversed(taken):
        number, used = candidates[rows[units]]
        allocation[layer] = number
        units -= used
    return {layer: allocation[layer] for layer in costs}
