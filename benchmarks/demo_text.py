"""Make the bundled text: the opening of a book of the corpus, with numbers hidden at even depths.

python benchmarks/demo_text.py --data TEST.jsonl.zst --tokenizer MODEL --output text.jsonl
"""

import argparse
import json
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from condense.results import refuse_existing
from condense.tasks import Key, hide, key_line, load_words, read_documents

OPENING = "Carmilla\n"  # by J. Sheridan LeFanu, 1871
TOKENS = 3900
NAMES = (  # all of them words that the model never saw in the task
    "yellow box",
    "brave priest",
    "silver clock",
    "golden bird",
    "broken cup",
    "cold river",
    "wooden throne",
    "tall stranger",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    refuse_existing(options.output, "output")
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)

    def count(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    book = next(document for document in read_documents(options.data) if document.startswith(OPENING))
    rng = np.random.default_rng(options.seed)
    words = set(load_words().held_out)
    assert all(word in words for name in NAMES for word in name.split())
    keys = [Key(*name.split(), str(rng.integers(1000, 10000))) for name in NAMES]
    room = TOKENS - sum(count(key_line(key)) for key in keys)
    lines = book.split("\n")
    end = next(index for index in range(1, len(lines)) if count("\n".join(lines[: index + 1])) > room)
    text = hide("\n".join(lines[:end]).rstrip() + "\n", keys, [(index + 0.5) / len(keys) for index in range(len(keys))])
    asked = [keys[index] for index in rng.permutation(len(keys))]
    content = {
        "source": "J. Sheridan LeFanu, Carmilla (1871), public domain; github.com/mlschmitt/classic-books-markdown",
        "text": text,
        "keys": [[key.first, key.second, key.number] for key in asked],
    }
    options.output.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{count(text)} tokens, {len(keys)} numbers")


if __name__ == "__main__":
    main()
