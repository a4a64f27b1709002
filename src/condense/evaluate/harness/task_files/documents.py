"""What the three tasks of this folder ask and how they score; the harness imports this file by the names in the YAML.

Each function that makes documents gets the run's metadata: ``data`` (folder of local files, or None), ``tokenizer``
(name or path), ``max_seq_lengths`` (tokens) and ``trust_remote_code`` (whether the tokenizer's own code may run).
"""

from __future__ import annotations

import importlib.resources
import json
import math
import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from condense.evaluate.harness.local import find, rows
from condense.tasks import draw_keys, hide, load_words, question_prompt, read_documents

LENGTHS = (4096,)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
KEYS = 8  # numbers hidden in every text
ANSWER_ROOM = 16  # tokens kept free for the question's answer
STRETCH = 256  # tokens that are scored, at the end of every length
SEED = 1234


def multidoc(data: str | None = None, **_: Any) -> dict[str, datasets.Dataset]:
    """Questions over many documents, one of which holds the answer, in the form of "Lost in the Middle".

    Needs ``nq-open-*.jsonl[.zst]`` with ``question``, ``answers`` and ``ctxs`` (``title``, ``text``).
    """
    files = find(data, "multidoc_em", "nq-open-*docs*", "nq-open-multidoc*")
    return _dataset(
        {
            "prompt": _multidoc_prompt(row),
            "answers": row["answers"],
            "total_documents": len(row["ctxs"]),
            "gold_index": row.get("gold_index", _gold_index(row["ctxs"])),
        }
        for file in files
        for row in rows(file)
    )


def multidoc_scores(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """best_subspan_em: the first line holds an answer (the published metric); exact_match: it is one."""
    said = _normalised(results[0].strip().split("\n")[0])
    answers = [_normalised(answer) for answer in doc["answers"]]
    return {
        "best_subspan_em": float(any(answer in said for answer in answers)),
        "exact_match": float(said in answers),
    }


def multikey(
    tokenizer: str,
    data: str | None = None,
    max_seq_lengths: Sequence[int] = LENGTHS,
    *,
    trust_remote_code: bool = False,
    **_: Any,
) -> dict[str, datasets.Dataset]:
    """`KEYS` numbers hidden at even depths of a text, one of them asked for: per length and depth 20 questions.

    The text is that of ``corpus-*.jsonl[.zst]`` or ``*.txt`` in the data folder, by default the bundled novel,
    repeated where it is too short.
    """
    encoder = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code)
    lines = _haystack(data)
    return _dataset(
        _multikey_question(encoder, lines, length, depth, index)
        for length in max_seq_lengths
        for index in range(20)
        for depth in DEPTHS
    )


def multikey_scores(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """exact_match: the answer begins with the number."""
    return {"exact_match": float(results[0].strip().startswith(doc["number"]))}


def stretches(
    tokenizer: str,
    data: str | None = None,
    max_seq_lengths: Sequence[int] = LENGTHS,
    *,
    trust_remote_code: bool = False,
    **_: Any,
) -> dict[str, datasets.Dataset]:
    """The last `STRETCH` tokens of the first p tokens of long documents, for p = 512, 1024, ... and each length."""
    encoder = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code)
    longest = max(max_seq_lengths)
    positions = sorted({*max_seq_lengths, *(2**n for n in range(9, 32) if 2**n < longest)})
    found = []
    for text in _documents(data):
        ids = encoder(text[: 16 * longest], add_special_tokens=False, verbose=False)["input_ids"]
        for p in positions:
            # room for one token that the harness puts in front, and for one more that another split may take
            stop = p - 2
            if len(ids) >= stop:
                before, stretch = encoder.decode(ids[: stop - STRETCH]), encoder.decode(ids[stop - STRETCH : stop])
                found.append({"before": before, "stretch": stretch, "position": p, "tokens": STRETCH})
    missing = sorted({*max_seq_lengths} - {each["position"] for each in found})
    if missing:
        raise ValueError(
            f"text_loss: wanted documents of at least {missing[0]} tokens, got none: put longer ones into --data"
        )
    return _dataset(found)


def stretch_scores(doc: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """nats_per_token: minus the log-likelihood of the stretch, over its tokens."""
    (log_likelihood, _), *_ = results
    loss = -log_likelihood / doc["tokens"]
    return {"nats_per_token": loss, "perplexity": loss}


def perplexity(losses: Sequence[float]) -> float:
    """e to the mean loss in nats."""
    return math.exp(sum(losses) / len(losses))


def _dataset(found: Any) -> dict[str, datasets.Dataset]:
    return {"test": datasets.Dataset.from_list(list(found))}


def _multidoc_prompt(row: dict[str, Any]) -> str:
    found = "\n".join(f"Document [{n}](Title: {x['title']}) {x['text']}" for n, x in enumerate(row["ctxs"], start=1))
    return (
        "Write a high-quality answer for the given question using only the provided search results (some of which "
        f"might be irrelevant).\n\n{found}\n\nQuestion: {row['question']}\nAnswer:"
    )


def _gold_index(ctxs: Sequence[dict[str, Any]]) -> int:
    return next((index for index, each in enumerate(ctxs) if each.get("isgold")), -1)


def _normalised(text: str) -> str:
    """Lower case without punctuation, articles and repeated blanks, as for SQuAD."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _documents(data: str | None) -> Iterator[str]:
    files = find(data, "text_loss", "corpus-test*", "*.txt", required=False)
    if files:
        yield from read_documents(files)
    else:
        yield "\n".join(_bundled_lines())


def _haystack(data: str | None) -> list[str]:
    return [line for text in _documents(data) for line in text.split("\n")] if data else _bundled_lines()


def _bundled_lines() -> list[str]:
    """The bundled novel without the numbers that are hidden in it."""
    asset = importlib.resources.files("condense") / "assets" / "demo" / "text.jsonl"
    text = json.loads(asset.read_text(encoding="utf-8"))["text"]
    return [line for line in text.split("\n") if not line.startswith("The number of the")]


def _multikey_question(
    tokenizer: PreTrainedTokenizerBase, lines: list[str], length: int, depth: float, index: int
) -> dict[str, Any]:
    rng = np.random.default_rng([SEED, length, index])
    keys = draw_keys(rng, load_words().held_out, KEYS)
    places = [0.01 + 0.98 * n / (KEYS - 1) for n in range(KEYS)]
    asked = round(depth * (KEYS - 1))
    question = question_prompt(keys[asked], "question")
    first = int(rng.integers(len(lines)))
    line_tokens = [len(ids) + 1 for ids in tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]]
    room = length - ANSWER_ROOM - len(tokenizer(hide("\n", keys, places) + question)["input_ids"])
    text: list[str] = []
    while room > 0:
        number = (first + len(text)) % len(lines)
        room -= line_tokens[number]
        text.append(lines[number])
    return {
        "prompt": hide("\n".join(text[:-1]) + "\n", keys, places) + question,
        "number": keys[asked].number,
        "length": length,
        "depth": depth,
    }
