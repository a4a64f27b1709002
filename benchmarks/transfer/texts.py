"""Sequences to train on and to measure on: plain text, verbatim copies, and text in which things to look up are hidden.

Everything is made of tokens that were encoded once; the tokenizer never merges across word starts and newlines, so
pieces encoded alone are the tokens of the whole text.
"""

from __future__ import annotations

import lzma
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from condense.tasks import load_words

# how a reader of packed tokens undoes `packed`; two bytes a token, so literals and matches begin at even places
_FILTERS: list[dict[str, Any]] = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 1, "pb": 1, "dict_size": 2**26}]
COPIED = 256  # tokens of the copy that ends a text which is measured
SURE = 32  # its first tokens, which nothing announces
KINDS = ("number", "shared", "several", "chain")
_KEYWORDS = frozenset({"return", "static", "struct", "unsigned", "defined", "define", "include", "double", "switch"})
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{5,}")


def packed(tokens: np.ndarray) -> bytes:
    """Tokens ``[N]`` uint16 in a few bits each."""
    return lzma.compress(tokens.astype("<u2").tobytes(), format=lzma.FORMAT_XZ, filters=_FILTERS)


def unpacked(folder: Path, pattern: str) -> np.ndarray:
    """The tokens of all packed files of that name in a folder, in order; ValueError if there is none."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise ValueError(f"corpus: wanted packed files {pattern} in {folder}, got none")
    return np.concatenate([np.frombuffer(lzma.decompress(file.read_bytes()), "<u2") for file in files])


@dataclass(frozen=True)
class Question:
    """A question ``ask``, and the pieces of its answer: those that count, and what stands between them."""

    kind: str
    lines: list[np.ndarray]
    ask: np.ndarray
    replies: list[np.ndarray]
    glue: list[np.ndarray]  # after each reply


@dataclass(frozen=True)
class Drawn:
    """One sequence. ids ``[L]`` int64. answers: kind, start and stop of everything that is to be looked up, ``copy``
    for what a text repeats. far ``[L]`` bool, of code: tokens of identifiers that stand far above.
    """

    ids: np.ndarray
    answers: list[tuple[str, int, int]] = field(default_factory=list)
    far: np.ndarray | None = None

    @property
    def asked(self) -> int:
        """The position where the first question or the copy begins; the length if there is none."""
        return min((start for _, start, _ in self.answers), default=len(self.ids))


class Texts:
    """Draws sequences from tokens ``[N]``; words: ``trained`` or ``held_out`` of the bundled list."""

    def __init__(self, tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase, words: str) -> None:
        self.tokens, self._tokenizer = tokens, tokenizer
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        self.pieces = pieces
        ends = np.array([piece.endswith("\n") for piece in pieces])
        ends[tokenizer.eos_token_id] = True
        self.ends_line = ends
        self._starts = np.concatenate([[0], np.flatnonzero(ends[tokens]) + 1])
        self._begins_word = np.array([piece.startswith(" ") for piece in pieces])
        self._words = np.array(getattr(load_words(), words))
        bos = tokenizer.bos_token_id
        self._bos = np.array([] if bos is None else [bos], np.int64)
        self._encode = cache(self._encoded)

    def _encoded(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)

    def _join(self, *texts: str) -> np.ndarray:
        return np.concatenate([self._encode(text) for text in texts])

    def stretch(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """``[size]`` int64 from a random line on."""
        last = np.searchsorted(self._starts, len(self.tokens) - size, side="right")
        start = int(self._starts[rng.integers(last)])
        return self.tokens[start : start + size].astype(np.int64)

    def plain(self, rng: np.random.Generator, length: int) -> Drawn:
        """Text alone."""
        return Drawn(np.concatenate([self._bos, self.stretch(rng, length - len(self._bos))]))

    def copying(self, rng: np.random.Generator, length: int, copied: int) -> Drawn:
        """Text that ends in ``copied`` tokens of an earlier stretch of itself, from a line on where it has one."""
        ids = self.plain(rng, length).ids
        at = length - copied
        lines = np.flatnonzero(self.ends_line[ids[: at - copied]]) + 1
        start = int(rng.choice(lines)) if len(lines) else int(rng.integers(at - copied))
        ids[at:] = ids[start : start + copied]
        ids[at - 1] = self._encode("\n")[-1]
        return Drawn(ids, [("copy", at + min(SURE, copied // 2), length)])

    def asking(self, rng: np.random.Generator, length: int, counts: dict[str, int]) -> Drawn:
        """Text with hidden lines, then questions about them in random order; as many of each kind as fit."""
        questions = self._questions(rng, counts)
        room = length - len(self._bos) - 1
        while len(questions) > 1 and sum(map(_size, questions)) > room * 7 // 8:
            questions.pop(int(rng.integers(len(questions))))
        body = self.stretch(rng, room - sum(map(_size, questions)))
        starts = np.concatenate([[0], np.flatnonzero(self.ends_line[body[:-1]]) + 1])
        words = np.union1d([0], np.flatnonzero(self._begins_word[body]))
        placed: list[tuple[int, np.ndarray]] = []
        for question in questions:
            allowed = words if question.kind == "shared" else starts
            places = np.sort(allowed[rng.integers(len(allowed), size=len(question.lines))])
            placed += [(int(place), line) for place, line in zip(places, question.lines, strict=True)]
        pieces, at = [self._bos], 0
        for place, line in sorted(placed, key=lambda entry: entry[0]):
            pieces += [body[at:place], line]
            at = place
        pieces += [body[at:], self._encode("\n")]
        size, answers = sum(map(len, pieces)), []
        for index in rng.permutation(len(questions)):
            question = questions[index]
            pieces.append(question.ask)
            size += len(question.ask)
            for reply, after in zip(question.replies, question.glue, strict=True):
                answers.append((question.kind, size, size + len(reply)))
                pieces += [reply, after]
                size += len(reply) + len(after)
        return Drawn(np.concatenate(pieces), answers)

    def _questions(self, rng: np.random.Generator, counts: dict[str, int]) -> list[Question]:
        """So many of each kind; ``several`` asks for three numbers at once, ``chain`` for a value by another name."""
        numbers = iter(1000 + rng.choice(9000, size=sum(counts.values()) * 3 + 8, replace=False))
        words = iter(rng.permutation(self._words))
        questions = []
        side = math.ceil(math.sqrt(2 * max(1, counts.get("shared", 0))))
        firsts, seconds = [next(words) for _ in range(side)], [next(words) for _ in range(side)]
        for pair in rng.choice(side**2, size=counts.get("shared", 0), replace=False):
            name, number = f" {firsts[pair // side]}", next(numbers)
            names = (name, f" {seconds[pair % side]}")
            line = self._join(" The number of the", *names, " is", f" {number}", ".")
            questions.append(self._about("shared", rng, names, int(number), line))
        for _ in range(counts.get("number", 0)):
            names, number = (f" {next(words)}", f" {next(words)}"), next(numbers)
            line = self._join("The number of the", *names, " is", f" {number}", ".\n")
            questions.append(self._about("number", rng, names, int(number), line))
        for _ in range(counts.get("several", 0)):
            triple = [((f" {next(words)}", f" {next(words)}"), f" {next(numbers)}") for _ in range(3)]
            lines = [self._join("The number of the", *names, " is", number, ".\n") for names, number in triple]
            (a, b, c), values = (names for names, _ in triple), [number for _, number in triple]
            ask = self._join("Question: What are the numbers of the", *a, ", the", *b, " and the", *c, "?\nAnswer:")
            glue = [self._encode(text) for text in (",", " and", ".\n")]
            questions.append(Question("several", lines, ask, [self._encode(value) for value in values], glue))
        for _ in range(counts.get("chain", 0)):
            first, second, number = f" {next(words)}", f" {next(words)}", f" {next(numbers)}"
            lines = [
                self._join("The value of", first, " is", number, ".\n"),
                self._join("The value of", second, " is the value of", first, ".\n"),
            ]
            ask = self._join("Question: What is the value of", second, "?\nAnswer:")
            questions.append(Question("chain", lines, ask, [self._encode(number)], [self._encode(".\n")]))
        return questions

    def _about(
        self, kind: str, rng: np.random.Generator, names: Sequence[str], number: int, line: np.ndarray
    ) -> Question:
        """One question about one number, as a question or as a line to complete."""
        if rng.random() < 0.5:
            ask = self._join("The number of the", *names, " is")
        else:
            ask = self._join("Question: What is the number of the", *names, "?\nAnswer:")
        return Question(kind, [line], ask, [self._encode(f" {number}")], [self._encode(".\n")])

    def code(self, rng: np.random.Generator, length: int) -> Drawn:
        """Code, with the tokens (not the first) of identifiers that last stood over a quarter of the text above."""
        ids = self.plain(rng, length).ids
        pieces = [self.pieces[i] for i in ids]
        ends = np.cumsum([len(piece) for piece in pieces])
        far, seen = np.zeros(length, bool), dict[str, int]()
        for match in _IDENTIFIER.finditer("".join(pieces)):
            name = match.group()
            first, last = (int(np.searchsorted(ends, at, side="right")) for at in (match.start(), match.end() - 1))
            before = seen.get(name)
            if before is not None and first - before > length // 4 and name not in _KEYWORDS:
                far[first + 1 : last + 1] = True
            seen[name] = last
        return Drawn(ids, far=far)


def _size(question: Question) -> int:
    answer = sum(map(len, question.replies)) + sum(map(len, question.glue))
    return sum(map(len, question.lines)) + len(question.ask) + answer


def training(texts: Texts, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """One sequence to train on, and a weight per token: half are plain, half of these end in a copy."""
    draw = rng.random()
    if draw < 0.25:
        sequence = texts.plain(rng, length)
    elif draw < 0.5:
        sequence = texts.copying(rng, length, int(rng.integers(min(48, length // 8), max(49, length // 4))))
    else:
        most = max(2, min(72, length // 64))
        counts = dict.fromkeys(KINDS, 0)
        for kind in rng.choice(KINDS, size=int(rng.integers(max(1, most // 8), most)), p=(0.35, 0.35, 0.1, 0.2)):
            counts[str(kind)] += 1
        sequence = texts.asking(rng, length, counts)
    weights = np.ones(length, np.float32)
    for kind, start, stop in sequence.answers:
        weights[start:stop] = 1.0 if kind == "copy" else 4.0
    return sequence.ids, weights


@dataclass(frozen=True)
class HeldOut:
    """The texts of one length: text that ends in a copy, code, and text with questions."""

    prose: list[Drawn]
    code: list[Drawn]
    asked: list[Drawn]


def held_out(prose: Texts, code: Texts, length: int, counts: tuple[int, int, int], seed: int = 1) -> HeldOut:
    """The same sequences for the same arguments; counts: of prose, code and questions' texts."""
    per_text = {"number": 16, "shared": 16, "several": 4, "chain": 10}
    share = min(1.0, max(length, 128) / 8192)
    asked = {kind: max(1, round(count * share)) for kind, count in per_text.items()}

    def draw(number: int, index: int) -> np.random.Generator:
        return np.random.default_rng([seed, length, number, index])

    copied = min(COPIED, length // 4)
    return HeldOut(
        [prose.copying(draw(0, i), length, copied) for i in range(counts[0])],
        [code.code(draw(1, i), length) for i in range(counts[1])],
        [prose.asking(draw(2, i), length, asked) for i in range(counts[2])],
    )
