"""Text to train on and to measure on, encoded and packed in files of a given number of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from texts import packed
from transformers import AutoTokenizer

import condense
from condense.tasks.corpus import encode_corpus
from condense.tasks.documents import read_json_lines

_HELD_OUT_PROJECT = "redis"  # code that identifiers are looked up in, beside that of the held-out files
_PROSE_TOKENS = 2_000_000


def pack(data: Path, output: Path, part_tokens: int, parts: int) -> None:
    """Write ``test-prose.xz``, ``test-code.xz`` and ``train-1.xz`` to ``train-N.xz``, and what is in them.

    Documents are drawn over all parts at random; the first files hold all code and documentation beside books.
    """
    output.mkdir(parents=True, exist_ok=True)
    kept: dict[str, list[np.ndarray]] = {"prose": [], "code": [], "first": [], "later": []}
    for path in sorted(data.glob("*.jsonl.zst")):
        test = path.name.startswith(("corpus-validation", "corpus-test", "long-test"))
        if not test and not path.name.startswith(("corpus-train", "long-train")):
            continue
        for record, tokens in _encoded(path):
            code = record["kind"] == "code"
            if test or (code and _HELD_OUT_PROJECT in record["source"]):
                kept["code" if code else "prose"].append(tokens)
            else:
                kept["first" if path.name.startswith("corpus") else "later"].append(tokens)
    rng = np.random.default_rng(0)
    for name in ("first", "later", "prose"):
        kept[name] = [kept[name][i] for i in rng.permutation(len(kept[name]))]
    train = np.concatenate(kept["first"] + kept["later"])
    files = {f"train-{i + 1}": train[i * part_tokens : (i + 1) * part_tokens] for i in range(parts)}
    files |= {"test-prose": np.concatenate(kept["prose"])[:_PROSE_TOKENS], "test-code": np.concatenate(kept["code"])}
    sizes = {}
    for name, tokens in files.items():
        content = packed(tokens)
        (output / f"{name}.xz").write_bytes(content)
        sizes[name] = {"tokens": len(tokens), "bytes": len(content)}
        print(name, sizes[name], flush=True)
    (output / "sizes.json").write_text(json.dumps(sizes, indent=1))


def _encoded(path: Path) -> Iterator[tuple[dict[str, str], np.ndarray]]:
    """Each record with its tokens and the separator."""
    tokenizer = AutoTokenizer.from_pretrained(Path(condense.__file__).parent / "assets" / "demo")
    records = list(read_json_lines(path))
    corpus = encode_corpus((record["text"] for record in records), tokenizer)
    yield from zip(records, np.split(corpus.tokens, corpus.document_starts[1:]), strict=True)
