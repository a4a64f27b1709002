"""Documents and scores of the three tasks of this folder; the harness imports this file by the names in the YAML.

Each function that makes documents gets the run's metadata: ``data`` (folder of local files, or None), ``tokenizer``
(name or path), ``max_seq_lengths`` (tokens) and ``trust_remote_code`` (whether the tokenizer's own code may run).
"""

import importlib.resources
import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from condense.tasks import draw_keys, hide, load_words, question_prompt, read_documents, read_json_lines

LENGTHS = (4096,)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
MULTIDOC_ROOM = 100  # tokens kept free for the answer over documents, the most that the model may write
KEYS = 8  # numbers hidden in every text
ANSWER_ROOM = 16  # tokens kept free for the question's answer
STRETCH = 256  # tokens that are scored, at the end of every length
SPARE = 2  # one token that the harness puts in front, and one more that another split may take
SEED = 1234


def multidoc(
    data: str | None = None, max_seq_lengths: Sequence[int] = (), **metadata: Any
) -> dict[str, datasets.Dataset]:
    """Questions over many documents, one of which holds the answer, in the form of "Lost in the Middle".

    Needs ``nq-open-*.jsonl[.zst]`` with ``question``, ``answers`` and ``ctxs`` (``title``, ``text``, ``isgold``).
    Without lengths every line is asked as it stands. With lengths every question is asked once at each: documents of
    other questions, without its answer, fill the prompt, and the one with the answer stands at a depth of `DEPTHS`,
    which take turns.
    """
    files = _find(data, "nq-open-*")
    rows = [row for file in files for row in read_json_lines(file)]
    if not files:
        raise ValueError(
            "multidoc_em: no data: wanted nq-open-*.jsonl or .jsonl.zst in --data FOLDER: download and unpack those of "
            "github.com/nelson-liu/lost-in-the-middle (qa_data)"
        )
    if not max_seq_lengths:
        return _dataset(_asked(row, row["ctxs"], f"{len(row['ctxs'])} documents", _gold(row)) for row in rows)
    questions: dict[str, dict[str, Any]] = {}
    for row in rows:  # files may ask a question several times, over more or fewer documents
        if len(row["ctxs"]) > len(questions.get(row["question"], {"ctxs": ()})["ctxs"]):
            questions[row["question"]] = row
    pool = {each["text"]: each for row in rows for each in row["ctxs"]}
    encoder = _encoder(**metadata)
    shown = encoder([_shown(9999, each) for each in pool.values()], add_special_tokens=False, verbose=False)
    tokens = {text: len(ids) for text, ids in zip(pool, shown["input_ids"], strict=True)}
    return _dataset(
        _filled(row, list(pool.values()), tokens, encoder, length, index)
        for index, row in enumerate(questions.values())
        for length in max_seq_lengths
    )


def _filled(
    row: dict[str, Any],
    pool: Sequence[dict[str, Any]],
    tokens: Mapping[str, int],
    encoder: PreTrainedTokenizerBase,
    length: int,
    index: int,
) -> dict[str, Any]:
    """A question over as many documents as ``length`` tokens take: its own first, then others in random order."""
    gold, depth = row["ctxs"][_gold(row)], DEPTHS[index % len(DEPTHS)]
    answers = [f" {_normalised(answer)} " for answer in row["answers"]]
    room = length - MULTIDOC_ROOM - len(encoder(_multidoc_prompt(row["question"], [gold]))["input_ids"])
    _check_room("multidoc_em", length, room)
    others: dict[str, dict[str, Any]] = {}
    order = np.random.default_rng([SEED, index]).permutation(len(pool))
    for each in chain(row["ctxs"], (pool[i] for i in order)):
        text = each["text"]
        if text in others or text == gold["text"] or any(answer in f" {_normalised(text)} " for answer in answers):
            continue
        room -= tokens[text]
        if room < 0:
            break
        others[text] = each
    else:
        raise ValueError(
            f"multidoc_em: the documents in --data fill {length - room} tokens, wanted {length}: add nq-open files, or "
            "choose a smaller --length"
        )
    place = round(depth * len(others))
    documents = list(others.values())
    return _asked(row, [*documents[:place], gold, *documents[place:]], str(length), depth)


def _asked(row: Any, documents: Sequence[dict[str, Any]], length: str, depth: float) -> dict[str, Any]:
    prompt = _multidoc_prompt(row["question"], documents)
    return {"prompt": prompt, "answers": row["answers"], "length": length, "depth": depth}


def multidoc_scores(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """best_subspan_em: the first line contains an answer (the published metric); exact_match: it equals one."""
    said = _normalised(results[0].strip().split("\n")[0])
    answers = [_normalised(answer) for answer in doc["answers"]]
    return {"best_subspan_em": float(any(answer in said for answer in answers)), "exact_match": float(said in answers)}


def multikey(
    data: str | None = None, max_seq_lengths: Sequence[int] = LENGTHS, **metadata: Any
) -> dict[str, datasets.Dataset]:
    """`KEYS` numbers hidden at even depths of a text, one of them asked for: per length and depth 20 questions.

    The text is that of ``corpus-test*.jsonl[.zst]`` or ``*.txt`` in the data folder, by default the bundled novel,
    repeated where it is too short.
    """
    encoder = _encoder(**metadata)
    lines = [line for text in _documents(data) for line in text.split("\n")]
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
    data: str | None = None, max_seq_lengths: Sequence[int] = LENGTHS, **metadata: Any
) -> dict[str, datasets.Dataset]:
    """The last `STRETCH` tokens of the first p tokens of long documents, for p = 512, 1024, ... and each length."""
    encoder = _encoder(**metadata)
    longest = max(max_seq_lengths)
    _check_room("text_loss", min(max_seq_lengths), min(max_seq_lengths) - STRETCH - SPARE)
    positions = sorted({*max_seq_lengths, *(2**n for n in range(9, 32) if 2**n < longest)})
    found = []
    for text in _documents(data):
        ids = encoder(text[: 16 * longest], add_special_tokens=False, verbose=False)["input_ids"]
        for p in positions:
            stop = p - SPARE
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
    return {"nats_per_token": -log_likelihood / doc["tokens"]}


def _check_room(task: str, length: int, room: int) -> None:
    """Raise ValueError if there is no room for text in a document of that length."""
    if room <= 0:
        raise ValueError(f"{task}: wanted a length above {length - room} tokens, to have room for text, got {length}")


def _encoder(*, tokenizer: str, trust_remote_code: bool = False, **_: Any) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code)


def _dataset(found: Any) -> dict[str, datasets.Dataset]:
    return {"test": datasets.Dataset.from_list(list(found))}


def _multidoc_prompt(question: str, documents: Sequence[dict[str, Any]]) -> str:
    return (
        "Write a high-quality answer for the given question using only the provided search results (some of which "
        f"might be irrelevant).\n\n{''.join(_shown(n, each) for n, each in enumerate(documents, start=1))}\n"
        f"Question: {question}\nAnswer:"
    )


def _shown(number: int, document: dict[str, Any]) -> str:
    return f"Document [{number}](Title: {document['title']}) {document['text']}\n"


def _gold(row: dict[str, Any]) -> int:
    """The place of the document with the answer. Raises ValueError if none is marked."""
    place = row.get("gold_index", next((i for i, each in enumerate(row["ctxs"]) if each.get("isgold")), None))
    if place is None:
        raise ValueError(f"multidoc_em: wanted a document with isgold for {row['question']!r}, got none")
    return int(place)


def _normalised(text: str) -> str:
    """Lower case without punctuation, articles and repeated blanks, as for SQuAD."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _find(folder: str | None, *patterns: str) -> list[Path]:
    """Files in the folder that fit a pattern; one without an ending fits ``.jsonl`` and ``.jsonl.zst``."""
    names = [p + ending for p in patterns for ending in ([""] if "." in p else [".jsonl", ".jsonl.zst"])]
    return sorted({path for name in names for path in Path(folder).glob(name)}) if folder else []


def _documents(data: str | None) -> Iterator[str]:
    files = _find(data, "corpus-test*", "*.txt")
    if files:
        yield from read_documents(files)
    else:  # the bundled novel without the numbers that are hidden in it
        asset = importlib.resources.files("condense") / "assets" / "demo" / "text.jsonl"
        text = json.loads(asset.read_text(encoding="utf-8"))["text"]
        yield "\n".join(line for line in text.split("\n") if not line.startswith("The number of the"))


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
    _check_room("multikey_retrieval", length, room)
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
