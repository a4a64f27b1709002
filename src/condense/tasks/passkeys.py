"""The hidden-numbers task as text: lines that state a number, and questions that ask for it.

A line says ``The number of the quiet bridge is 4821.``; two common words name the number, which has four digits.
The questions stand after the text. They come in two forms (`question_prompt`), so that a model learns more than one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FORMS = ("cloze", "question")
LEAST_FOUND = 0.6  # share that dense attention must find for a task to count
_SPLIT_SEED = 0  # one split for all runs: a model's seed must not decide which words it is tested on
_HELD_OUT_SHARE = 0.2


@dataclass(frozen=True)
class Words:
    """Two disjoint lists of lowercase words: one to train on, one held out for tests."""

    trained: tuple[str, ...]
    held_out: tuple[str, ...]


def load_words() -> Words:
    """The bundled 3,000 words, a fixed fifth of them held out; where they are from: `assets/demo/README.md`."""
    words = (Path(__file__).parents[1] / "assets" / "words.txt").read_text(encoding="utf-8").split()
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(words))
    held_out = set(order[: round(len(words) * _HELD_OUT_SHARE)].tolist())
    return Words(
        trained=tuple(word for index, word in enumerate(words) if index not in held_out),
        held_out=tuple(word for index, word in enumerate(words) if index in held_out),
    )


@dataclass(frozen=True)
class Key:
    """One hidden number: two words that name it, and its four digits as a string."""

    first: str
    second: str
    number: str


def draw_keys(rng: np.random.Generator, words: Sequence[str], count: int, *, shared: bool = False) -> list[Key]:
    """``count`` keys with different numbers and names.

    shared: names share words with each other (quiet bridge, quiet garden); otherwise no word is used twice.
    Raises ValueError if ``count`` is not positive, or needs more words than there are.
    """
    most = len(words) ** 2 // 8 if shared else len(words) // 2
    if not 0 < count <= most:
        raise ValueError(f"count: wanted 1 to {most} keys for {len(words)} words, got {count}")
    # shared: as many first and second words as make about twice as many pairs as there are keys
    side = math.ceil(math.sqrt(2 * count)) if shared else count
    chosen = rng.choice(len(words), size=2 * side, replace=False)
    numbers = 1000 + rng.choice(9000, size=count, replace=False)
    if shared:
        pairs = [divmod(int(pair), side) for pair in rng.choice(side**2, size=count, replace=False)]
        names = [(chosen[first], chosen[side + second]) for first, second in pairs]
    else:
        names = [(chosen[2 * index], chosen[2 * index + 1]) for index in range(count)]
    return [Key(words[a], words[b], str(number)) for (a, b), number in zip(names, numbers, strict=True)]


def key_line(key: Key) -> str:
    """The line that states the number, without its newline."""
    return f"The number of the {key.first} {key.second} is {key.number}."


def question_prompt(key: Key, form: str = "cloze") -> str:
    """The text after which the model should go on with a space and the number.

    Raises ValueError for an unknown form.
    """
    if form == "cloze":
        return f"The number of the {key.first} {key.second} is"
    if form == "question":
        return f"Question: What is the number of the {key.first} {key.second}?\nAnswer:"
    raise ValueError(f"form: wanted one of {', '.join(FORMS)}, got {form!r}")


def hide(text: str, keys: Sequence[Key], depths: Sequence[float]) -> str:
    """``text`` with one line per key, put at the line starts nearest to the given depths.

    text: the haystack, with lines. keys: what to hide. depths: for every key a share of the text, 0 (top) to 1.
    Raises ValueError if the text is empty, or there are not as many depths as keys, or a depth lies outside 0 to 1.
    """
    if not text:
        raise ValueError("text: wanted a text to hide numbers in, got an empty string")
    if len(depths) != len(keys) or any(not 0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths: wanted {len(keys)} numbers from 0 to 1, got {list(depths)}")
    body = text if text.endswith("\n") else text + "\n"
    lines = [line + "\n" for line in body.split("\n")[:-1]]
    starts = np.cumsum([0, *(len(line) for line in lines)])
    places = [int(np.argmin(np.abs(starts - depth * len(body)))) for depth in depths]
    # From the bottom up, so that an insertion does not move the places still to come.
    for place, key in sorted(zip(places, keys, strict=True), key=lambda pair: pair[0], reverse=True):
        lines.insert(place, key_line(key) + "\n")
    return "".join(lines)
