"""Grids of parameters as covering arrays: few cells in which every value occurs, and as many pairs of values as fit."""

import hashlib
import itertools

import pytest

CPU_BACKENDS = ("reference", "torch", "torch-blocks")


def grid(count, /, *fixtures, **axes):
    """Parametrize a test by ``count`` cells of the product of ``axes``: arguments, each with a list of values or a
    mapping of ids to values. fixtures: those that are fixtures, beside `backend`.
    """
    named = {name: x if isinstance(x, dict) else {str(value): value for value in x} for name, x in axes.items()}
    product = list(itertools.product(*named.values()))
    assert count < len(product), f"{count} of {len(product)} cells: parametrize by all of them"
    names = ["-".join(map(str, ids)) for ids in product]
    cells = [(names[i], product[i]) for i in sorted(covering(names, [set(enumerate(ids)) for ids in product], count))]
    cells = [(name, [named[axis][x] for axis, x in zip(named, ids, strict=True)]) for name, ids in cells]
    values = [pytest.param(*cell, id=name) for name, cell in cells]
    return pytest.mark.parametrize(list(named), values, indirect=[x for x in named if x in ("backend", *fixtures)])


def fixture_of(cases):
    """A fixture that is each of the values of a mapping in turn, by its name."""
    return pytest.fixture(params=cases.values(), ids=cases)(lambda request: request.param)


def covering(names, values, count):
    """Numbers of cells, each with the most values that no cell before it has, of equals with the most new pairs."""
    left = sorted(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).digest())
    values, kept = list(values), []
    pairs = [set(itertools.combinations(sorted(x), 2)) for x in values]
    while len(kept) < count:
        best = max(left, key=lambda i: (len(values[i]), len(pairs[i])))
        seen, seen_pairs = values[best], pairs[best]
        for i in left:
            values[i], pairs[i] = values[i] - seen, pairs[i] - seen_pairs
        left.remove(best)
        kept.append(best)
    return kept
