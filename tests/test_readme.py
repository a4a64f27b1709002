"""The README is true: its Python runs, its commands exist, its files are there, its numbers are measured."""

import re
import shlex
import sys
from pathlib import Path

import typer

from condense.cli.main import app

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "pages"))

import readme_page
import stored

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
# names and versions, which are no measurements
NAMES = (
    r"Llama-3\.1-8B|H200|\d+ bits|FP8|Python 3\.11|torch 2\.11|transformers 5\.17|MiniCPM3|V3|ICML 2025|ACL 2026|2\.0"
)


def test_it_is_short():
    assert len(README.splitlines()) <= 90


def test_python_runs_as_it_stands():
    names = {}
    (block,) = PYTHON
    exec(block, names)
    prompt = names["prompt"]
    assert prompt.expected[0] in names["tokenizer"].decode(names["answer"])


def test_commands_are_accepted():
    commands = typer.main.get_command(app).commands
    lines = re.findall(r"`condense (\w[^`]*)`|^\.venv/bin/condense (.*?)(?:    #.*)?$", README, re.MULTILINE)
    assert len(lines) >= 3
    for name, *words in (shlex.split("".join(line)) for line in lines):
        if words != ["--help"]:
            commands[name].make_context(name, words)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert re.search(rf"^make {target} ", README, re.MULTILINE)
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_every_number_is_of_a_result_or_a_setting():
    # the table is compared with the results in benchmarks/test_pages.py
    prose = re.sub(
        r"^```.*?^```|<!-- figures -->.*<!-- /figures -->|^\|.*?$", "", README, flags=re.MULTILINE | re.DOTALL
    )
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`", " ", prose)
    prose = re.sub(r"\s+", " ", prose.replace("[", "").replace("]", ""))
    for claim in readme_page.claims(stored.stored()):
        assert claim in prose
        prose = prose.replace(claim, "")
    assert re.findall(r"(?<![a-z\d])\d[\d.,]*", re.sub(NAMES, "", prose)) == []


def test_sentences_have_few_numbers_and_few_cells_are_open():
    prose = re.sub(r"^```.*?^```|^\|.*?$|\]\([^)]*\)", "", README, flags=re.MULTILINE | re.DOTALL)
    for sentence in re.split(r"[.:;] |\n\n|\n- ", prose):
        assert len(re.findall(r"(?<![a-z\d])\d[\d.,]*", re.sub(NAMES, "", sentence))) <= 3, sentence
    assert README.count(f" {readme_page.UNKNOWN} ") <= 2
