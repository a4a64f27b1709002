"""The hidden-numbers task as tokens: sequences of an exact length, built from pieces encoded once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from condense.tasks.corpus import Corpus, num_ids
from condense.tasks.passkeys import FORMS, Key, draw_keys

_LEAST_TEXT = 1 / 8  # smallest share of text in a sequence; keys that would leave less are dropped


@dataclass(frozen=True)
class PasskeySequence:
    """One sequence: text with hidden numbers, then the questions with their answers.

    input_ids: ``[L]`` int64. keys: the hidden numbers, in the order of the questions. answers: for every question the
    span ``[start, stop)`` of the tokens of its answer (space and digits). depths: for every question the place of its
    line, from 0 (the beginning of the text) to 1 (its end, where the questions begin).
    """

    input_ids: np.ndarray
    keys: tuple[Key, ...]
    answers: tuple[tuple[int, int], ...]
    depths: tuple[float, ...]


class SequenceBuilder:
    """Builds sequences of one length from a corpus: plain text, and text with hidden numbers.

    All pieces (words, numbers, the fixed parts of a line) are encoded once, here, so that a sequence costs some
    array copies. With a tokenizer that never merges across word starts and newlines (the library's own) the
    tokens equal those of the whole text; others may merge across the pieces, and read the same text all the same.

    tokenizer: a fast tokenizer; sequences start with its ``bos`` token if it has one. corpus: where the text comes
    from. words: used to name numbers. length: tokens of every sequence.
    Raises ValueError if the length is below 128, or the corpus is shorter than one sequence, or has no line starts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, corpus: Corpus, words: Sequence[str], length: int) -> None:
        if length < 128:
            raise ValueError(f"length: wanted at least 128 tokens, got {length}")
        if len(corpus.tokens) <= length:
            raise ValueError(
                f"corpus: wanted more tokens than length {length}, those of a sequence, got {len(corpus.tokens)}: give "
                "more text, or ask for shorter sequences"
            )
        self.length = length
        self._corpus = corpus
        # Text may start at any line that leaves a whole sequence behind it.
        last = int(np.searchsorted(corpus.line_starts, len(corpus.tokens) - length, side="right"))
        self._starts = corpus.line_starts[:last]
        self._words = tuple(words)
        bos = tokenizer.bos_token_id
        self._bos = np.array([] if bos is None else [bos], np.int64)

        def ids_of(texts: list[str]) -> list[list[int]]:
            return list(tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"])

        def encode(texts: list[str]) -> list[np.ndarray]:
            # encoded after another character, as inside a line: some tokenizers add a space at the start of a text
            anchors = ["\n" if text[0].isalpha() else "x" for text in texts]
            heads = {anchor: ids_of([anchor])[0] for anchor in set(anchors)}
            wholes = ids_of([anchor + text for anchor, text in zip(anchors, texts, strict=True)])
            pieces = []
            for anchor, text, whole in zip(anchors, texts, wholes, strict=True):
                head = heads[anchor]
                piece = whole[len(head) :] if whole[: len(head)] == head else ids_of([text])[0]
                pieces.append(np.array(piece, np.int64))
            return pieces

        self._word_ids = dict(zip(self._words, encode([f" {word}" for word in self._words]), strict=True))
        numbers = [str(number) for number in range(1000, 10000)]
        self._number_ids = dict(zip(numbers, encode([f" {number}" for number in numbers]), strict=True))
        self._the_number, self._is, self._end, self._question, self._answer, self._newline = encode(
            ["The number of the", " is", ".\n", "Question: What is the number of the", "?\nAnswer:", "\n"]
        )
        self._the_number_inside, self._stop = encode([" The number of the", "."])
        # byte-level tokenizers write a space as the first of these, SentencePiece as the second
        tokens = tokenizer.convert_ids_to_tokens(list(range(num_ids(tokenizer))))
        self._begins_word = np.array([(token or "").startswith(("\u0120", "\u2581")) for token in tokens])

    def plain(self, rng: np.random.Generator) -> np.ndarray:
        """``[length]`` int64: a stretch of text that starts at a random line."""
        return np.concatenate([self._bos, self._text(rng, self.length - len(self._bos))[0]])

    def documents(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Whole documents between parts of two others: ``[size]`` int64, and where each begins, ``[documents]`` int64.

        The first begins at a random line, the last is cut; the tokenizer's ``bos`` stands before each.
        """
        start = int(self._starts[rng.integers(len(self._starts))])
        known = self._corpus.document_starts
        begun, ended = np.searchsorted(known, start, side="right"), np.searchsorted(known, start + size)
        starts = np.concatenate([[0], known[begun:ended] - start])
        text = self._corpus.tokens[start : start + size].astype(np.int64)
        if len(self._bos):
            text = np.insert(text, starts, self._bos)[:size]
            starts += np.arange(len(starts))
        return text, starts[starts < size]

    def passkeys(
        self,
        rng: np.random.Generator,
        count: int,
        form: str,
        *,
        shared: bool = False,
        anywhere: bool = False,
        opening: bool = False,
        size: int | None = None,
    ) -> PasskeySequence:
        """Text with ``count`` numbers hidden at uniform depth, and the questions in random order at the end.

        shared: see `draw_keys`. anywhere: the numbers stand between any two words, as sentences; otherwise on lines of
        their own. opening: one of them is the first thing in the text. size: tokens up to the end of the answers, after
        which other text follows; None: the whole sequence. Of ``count`` numbers as many are hidden as fit.

        Raises ValueError for an unknown form, or a ``count`` that ``draw_keys`` refuses.
        """
        if form not in FORMS:
            raise ValueError(f"form: wanted one of {', '.join(FORMS)}, got {form!r}")
        size = self.length if size is None else size
        keys = draw_keys(rng, self._words, count, shared=shared)
        lines = [self._line(key, inside=anywhere) for key in keys]
        questions = [self._ask(key, form) for key in keys]
        room = size - len(self._bos) - len(self._newline)
        sizes = [len(line) + len(ask) + len(reply) for line, (ask, reply) in zip(lines, questions, strict=True)]
        while len(keys) > 1 and room - sum(sizes) < size * _LEAST_TEXT:
            for parts in (keys, lines, questions, sizes):
                parts.pop()

        text, allowed = self._text(rng, room - sum(sizes))
        depths = rng.random(len(keys)) * len(text)
        if opening:
            depths[0] = 0
        if anywhere:
            allowed = np.union1d(allowed[:1], np.flatnonzero(self._begins_word[text]))
        nearest = np.abs(allowed[:, None] - depths).argmin(0)
        body, offsets = _inserted(text, lines, allowed[nearest])
        pieces = [self._bos, *body, self._newline]
        length = sum(map(len, pieces))

        asked = rng.permutation(len(keys))
        depth = (len(self._bos) + offsets) / length
        answers = []
        for index in asked:
            ask, reply = questions[index]
            pieces += [ask, reply]
            start = length + len(ask)
            length = start + len(reply)
            answers.append((int(start), int(length - len(self._end))))
        pieces.append(self._text(rng, self.length - size)[0])
        return PasskeySequence(
            input_ids=np.concatenate(pieces),
            keys=tuple(keys[index] for index in asked),
            answers=tuple(answers),
            depths=tuple(float(depth[index]) for index in asked),
        )

    def _text(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """A stretch of ``size`` tokens, and the offsets in it at which lines begin (0 is always one)."""
        first = int(rng.integers(len(self._starts)))
        start = int(self._starts[first])
        last = int(np.searchsorted(self._corpus.line_starts, start + size))
        text = self._corpus.tokens[start : start + size].astype(np.int64)
        return text, self._corpus.line_starts[first:last] - start

    def _line(self, key: Key, *, inside: bool) -> np.ndarray:
        opening, end = (self._the_number_inside, self._stop) if inside else (self._the_number, self._end)
        return np.concatenate([*self._name(key, opening), self._is, self._number_ids[key.number], end])

    def _ask(self, key: Key, form: str) -> tuple[np.ndarray, np.ndarray]:
        """The question up to where the answer begins, and the answer with its full stop and newline."""
        if form == "cloze":
            ask = [*self._name(key, self._the_number), self._is]
        else:
            ask = [*self._name(key, self._question), self._answer]
        return np.concatenate(ask), np.concatenate([self._number_ids[key.number], self._end])

    def _name(self, key: Key, opening: np.ndarray) -> list[np.ndarray]:
        return [opening, self._word_ids[key.first], self._word_ids[key.second]]


def _inserted(text: np.ndarray, lines: list[np.ndarray], places: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """The text in pieces, with each line before its offset in ``places``, and where each line begins in the result."""
    pieces, offsets = [], np.zeros(len(lines), np.int64)
    at = added = 0
    for index in np.argsort(places, kind="stable"):
        pieces += [text[at : places[index]], lines[index]]
        offsets[index] = places[index] + added
        at, added = places[index], added + len(lines[index])
    return [*pieces, text[at:]], offsets
