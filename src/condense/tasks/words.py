"""Common English words that name the hidden numbers, split into words to train on and words to test on."""

import importlib.resources
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_WORD = re.compile(r"(?<![\w'-])[a-z]{3,10}(?![\w'-])")
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


def common_words(documents: Iterable[str], count: int, skip: int = 200) -> list[str]:
    """The most frequent lowercase words of 3 to 10 letters, most frequent first.

    documents: texts to count in. count: how many words to return; fewer if the texts do not have them. skip: how many
    of the most frequent to leave out (``the``, ``and``, ...: poor names for anything).
    Raises ValueError if ``count`` is not positive.
    """
    if count <= 0:
        raise ValueError(f"count: wanted a positive number of words, got {count}")
    counter: Counter[str] = Counter()
    for document in documents:
        counter.update(_WORD.findall(document))
    return [word for word, _ in counter.most_common(skip + count)[skip:]]
