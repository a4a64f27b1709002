"""Common English words that name the hidden numbers, split into words to train on and words to test on."""

import importlib.resources
from dataclasses import dataclass

import numpy as np

_SPLIT_SEED = 0  # one split for all runs: a model's seed must not decide which words it is tested on
_HELD_OUT_SHARE = 0.2


@dataclass(frozen=True)
class Words:
    """Two disjoint lists of lowercase words: one to train on, one held out for tests."""

    trained: tuple[str, ...]
    held_out: tuple[str, ...]


def load_words() -> Words:
    """The bundled 3,000 words, a fixed fifth of them held out; where they are from: `assets/demo/README.md`."""
    text = (importlib.resources.files("condense") / "assets" / "words.txt").read_text(encoding="utf-8")
    words = text.split()
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(words))
    held_out = set(order[: round(len(words) * _HELD_OUT_SHARE)].tolist())
    return Words(
        trained=tuple(word for index, word in enumerate(words) if index not in held_out),
        held_out=tuple(word for index, word in enumerate(words) if index in held_out),
    )
