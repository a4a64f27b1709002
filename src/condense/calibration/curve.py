"""The curve of quality against cache: allocations from the most faithful to the smallest, and the choice among them."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from condense.calibration.config import CalibrationConfig
from condense.calibration.measure import Allocation, Meter
from condense.calibration.report import CurvePoint, LayerLoss, Mean, found_of
from condense.methods import Dense
from condense.models.inspect import LayerReport, cache_shares

# number of points of the curve that are measured whatever the goals are
NUM_POINTS = 9
_UNITS = 2**14  # parts into which `best_within` divides the bytes that it may give out


class Curve:
    """Allocations from the largest to the smallest, each with its point on measured and on held-out texts."""

    def __init__(
        self, meter: Meter, config: CalibrationConfig, losses: list[LayerLoss], reports: list[list[LayerReport]]
    ) -> None:
        """reports: per candidate, one report for each layer of the model; allocations cover the layers in ``losses``.

        The path is the greedy one, with each candidate in all layers added, and for a size of the cache the allocation
        that loses least within it; not added is what another on the path beats or equals in bytes and in losses.
        """
        self._meter, self._config, self._reports = meter, config, reports
        methods = config.candidates
        known = {(loss.layer, loss.method): loss for loss in losses}
        layers = list(dict.fromkeys(loss.layer for loss in losses))
        # layer -> loss of each candidate; of those not measured 0 for dense attention, and no others are taken
        unknown = [0.0 if isinstance(method, Dense) else math.inf for method in methods]
        self._lost = {
            i: [known[i, m].total if (i, m) in known else lost for m, lost in zip(methods, unknown, strict=True)]
            for i in layers
        }
        of_layers = {rows[0].layer: [row.bytes for row in rows] for rows in zip(*reports, strict=True)}
        self._sizes = {i: of_layers[i] for i in layers}
        self.path = greedy_path(self._lost, self._sizes)
        if config.cache is not None:
            room = most_bytes(config.cache, sum(row.dense_bytes for row in reports[0]))
            room -= sum(row.bytes for row in reports[0] if row.layer not in layers)
            self._add(best_within(self._lost, self._sizes, room))
        for number in range(len(methods)):
            self._add(dict.fromkeys(layers, number))
        last = len(self.path) - 1
        self.grid = sorted({round(i * last / (NUM_POINTS - 1)) for i in range(NUM_POINTS)})
        self._asked: set[int] = set()

    def cache(self, at: int) -> float:
        """Bytes that the allocation at a place of the path keeps on the device, as a share of a dense cache's."""
        return self._shares(self.path[at])[0]

    def small_enough(self) -> int:
        """The first place of the path whose cache is as small as asked for; `check_cache` ensures that there is one."""
        most = self._config.cache
        return next(at for at in range(len(self.path)) if most is None or self.cache(at) <= most)

    def _add(self, allocation: dict[int, int]) -> None:
        """Put an allocation into the path by its size, unless one there keeps no more bytes and loses no more."""
        (size, lost), *known = [
            [sum(of[layer][number] for layer, number in each.items()) for of in (self._sizes, self._lost)]
            for each in (allocation, *self.path)
        ]
        if not any(its_size <= size and its_lost <= lost for its_size, its_lost in known):
            self.path.insert(sum(its_size > size for its_size, _ in known), allocation)

    def measure_grid(self) -> None:
        """Measure the points of the grid, with one dense forward per text."""
        for i in self._meter.measured:
            self._meter.read(i, [{}, *(self.path[at] for at in self.grid)])
        self._asked |= set(self.grid)

    def measured(self, at: int) -> CurvePoint:
        """The point at a place of the path, on the measured texts."""
        self._asked.add(at)
        return self.point(self.path[at], self._meter.measured)

    def verified(self, at: int) -> CurvePoint:
        """The point at a place of the path, on held-out texts."""
        return self.point(self.path[at], self._meter.held_out)

    def points(self) -> tuple[CurvePoint, ...]:
        """All points that were measured, from the largest cache to the smallest."""
        return tuple(map(self.measured, sorted(self._asked)))

    def point(self, allocation: Allocation, samples: Sequence[int]) -> CurvePoint:
        """The point of any allocation on these texts."""
        dense, readings = zip(*(self._meter.read(i, [{}, allocation]) for i in samples), strict=True)
        plain = [reading for reading in readings if not reading.right]
        cache, host = self._shares(allocation)
        methods = {i: self._config.candidates[n] for i, n in allocation.items()}
        kl, nats = Mean.of([reading.kl for reading in plain]), Mean.of([reading.nats for reading in plain])
        return CurvePoint(methods, cache, host, kl, nats, found_of(readings, dense))

    def _shares(self, allocation: Allocation) -> tuple[float, float]:
        """Bytes on the device and in host memory, as shares of a dense cache's."""
        return cache_shares([rows[allocation.get(rows[0].layer, 0)] for rows in zip(*self._reports, strict=True)])


def most_bytes(share: float, dense: int) -> int:
    """The largest n with ``n / dense <= share``, the comparison that `check_cache` makes.

    ``int(share * dense)`` may be one less because it is rounded: 0.29 * 100 < 29, but 29 / 100 <= 0.29.
    """
    product = int(share * dense)
    return next(n for n in (product + 1, product, product - 1) if n / dense <= share)


def check_cache(reports: Sequence[Sequence[LayerReport]], config: CalibrationConfig) -> None:
    """Raise ValueError if ``config.cache`` is less than what the smallest candidates keep. reports: as in `Curve`."""
    layers = list(zip(*reports, strict=True))
    least = sum(min(row.bytes for row in of) for of in layers) / sum(of[0].dense_bytes for of in layers)
    if config.cache is not None and config.cache < least:
        raise ValueError(
            f"cache must be at least {least:.4f}, what the smallest of these candidates keep at "
            f"{config.counted_length} tokens, got {config.cache}: add smaller candidates"
        )


def choose(curve: Curve, config: CalibrationConfig) -> int:
    """The place on the path that meets the goals on measured texts: the smallest within the budget, or small enough.

    Raises ValueError if none meets the goals; the message says what can be reached.
    """
    small = curve.small_enough()
    curve.measure_grid()
    if config.budget_nats is None:
        return small
    if config.cache is not None and curve.measured(small).within(config):
        return small
    last = _last_within(curve, config)
    if last is None:
        raise ValueError(
            f"budget_nats: none of these candidates stays within {config.budget_nats}: the most faithful allocation "
            f"{curve.measured(0).quality()}; add better candidates, such as dense"
        )
    if last < small:
        raise ValueError(
            f"budget_nats and cache cannot both be met: at {curve.cache(small):.1%} of the cache the model "
            f"{curve.measured(small).quality()}; at {curve.cache(last):.1%}, the least within the budget, it "
            f"{curve.measured(last).quality()}"
        )
    return last


def _last_within(curve: Curve, config: CalibrationConfig) -> int | None:
    """The last place within the budget before the first place of the grid that exceeds it; None if there is none."""
    low, high = -1, len(curve.path)
    for at in curve.grid:
        if not curve.measured(at).within(config):
            high = at
            break
        low = at
    while high - low > 1 and low >= 0:
        middle = (low + high) // 2
        low, high = (middle, high) if curve.measured(middle).within(config) else (low, middle)
    return low if low >= 0 else None


def verify(curve: Curve, config: CalibrationConfig, chosen: int) -> int:
    """The place chosen, or else the nearest before it, that is within the budget on measured and on held-out texts.

    Raises ValueError if there is none, or none that keeps the cache small enough.
    """
    least = curve.small_enough()
    for at in range(chosen, least - 1, -1):
        if curve.verified(at).within(config) and curve.measured(at).within(config):
            return at
    kind, point = "held-out text too", curve.verified(least)
    if point.within(config):
        kind, point = "the text that was measured", curve.measured(least)
    raise ValueError(
        f"budget_nats must be met on {kind}: {curve.cache(least):.1%} of the cache {point.quality()} there, more than "
        f"{config.budget_nats} or too few of the numbers: measure more texts, or raise the budget"
    )


def greedy_path(costs: Mapping[int, Sequence[float]], sizes: Mapping[int, Sequence[int]]) -> list[dict[int, int]]:
    """Allocations (layer to the number of its candidate), each smaller in one layer than the one before.

    costs, sizes: per layer, the loss and the bytes of each candidate. The first allocation has in every layer the
    candidate that loses least, the smallest one among equals. Each next one takes, of all smaller candidates in all
    layers, the one that loses least per byte saved; among equals the one that saves most, then the one in the lowest
    layer. So no candidate is taken that another beats in loss and bytes.
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

    costs, sizes: as in `greedy_path`; the smallest candidates must fit. Found by dynamic programming over the layers
    (the multiple-choice knapsack problem) in whole units of a 16,384th of what the smallest candidates leave over.
    Sizes are rounded up, so an allocation that only just fits may be missed. Of equal losses the smaller one is taken.
    """
    least = {layer: min(size) for layer, size in sizes.items()}
    unit = max(1, -(-(room - sum(least.values())) // _UNITS))
    units = (room - sum(least.values())) // unit
    lost = np.zeros(units + 1)  # lost[u]: the least loss of the layers so far that take at most u units
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
