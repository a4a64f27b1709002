"""The pages and the README: their Python runs, their commands parse, what they name exists, their numbers are true."""

import importlib.util
import json
import pkgutil
import re
import runpy
import shlex
from pathlib import Path

import matplotlib
import pytest
import readme_page
import stored
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

import condense
from condense import config
from condense.cli.main import app
from condense.methods import Method
from condense.models import choice_from_text
from condense.models.fit import cache_fits
from condense.models.shapes import shape_config
from condense.named import NAMED_SETTINGS
from condense.ops.backends import Backend, Operations

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
README = PAGES["README.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TRAINERS = "docs/guides/other-trainers.md"
# a page whose code needs a package that `make test-eval` installs runs there
NEEDS = {TRAINERS: "trl"}
HAS = {page: importlib.util.find_spec(package) for page, package in NEEDS.items()}
WITH_PYTHON = [page for page, text in PAGES.items() if BLOCK.search(text) and HAS.get(page, True)]
# names of result files, and of the documents in those that hold several
DOCUMENTS = {path.stem: json.loads(path.read_bytes()) for path in ROOT.glob("benchmarks/results/*.json")}
RESULTS = {*DOCUMENTS, *(name for documents in DOCUMENTS.values() for name in documents)}
LINES = re.compile(r"^(?:\.venv/bin/)?(condense [a-z].*)", re.MULTILINE)
SHOWN = [*(line for text in PAGES.values() for line in LINES.findall(text)), *re.findall(r"`(condense \w.*?)`", README)]
COMMANDS = sorted({line for line in SHOWN if "--help" not in line})
# of which page the code names a model that is not here, and what it names it
ELSEWHERE = "docs/start-here.md"
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
# names and versions, which are no measurements
NAMES = (
    r"Llama-3\.1-8B|H200|\d+ bits|FP8|Python 3\.11|torch 2\.11|transformers 5\.17 to 5\.24|"
    r"MiniCPM3|V3|ICML 2025|ACL 2026|2\.0"
)
PAGE = PAGES[ELSEWHERE]
OF_ROWS = {"recall-device": '"recall-device"', "recall-host": '"recall-host"', "dense, FP8": "kv-cache-dtype fp8"}
OF_ROWS["pooled"] = "condense train adapt"
NOTEBOOK = ROOT / "docs" / "notebooks" / "first_look.ipynb"
CHANGES = {"some open": {}, "two open": {"num_recall": 2}, "all open": {"num_recall": 100}}
CHANGES["no window"] = {"group_size": 6, "window": 0}
RECALL_PAGE = ROOT / "docs" / "recall_in_100_lines.py"
# scores and outputs are sums of at most 16 and 100 products of normal numbers, below 5 in size, added in another order
TOLERANCE = 2 * (16 + 100) * 5 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs_as_it_stands(page, tmp_path, monkeypatch):
    monkeypatch.setattr(config, "REGISTRY", dict(config.REGISTRY))  # a guide's method is known to its guide alone
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *args, **kwargs: None)  # which takes minutes on a CPU
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "guide"}
    if page == TRAINERS:  # the variables that torchrun sets
        for key, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(key, value)
    if page == ELSEWHERE:
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained("model")
        names |= {"name": "model", "path": "here", "inputs": {"input_ids": torch.randint(2, 64, (1, 40))}}
    for block in BLOCK.finditer(PAGES[page]):
        line = PAGES[page].count("\n", 0, block.start(1))
        exec(compile("\n" * line + block.group(1), ROOT / page, "exec"), names)
    if page == "README.md":
        assert names["prompt"].expected[0] in names["tokenizer"].decode(names["answer"])


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line):
    words, command = shlex.split(line, comments=True)[1:], typer.main.get_command(app)
    while hasattr(command, "commands"):  # a group of commands: the next word names one
        command = command.commands[words.pop(0)]
    methods = command.make_context(command.name, words).params.get("method") or []
    for method in [methods] if isinstance(methods, str) else methods:
        if not method.startswith("@"):  # names a file, which these tests do not have
            choice_from_text(method)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_names_of_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", PAGES[page]):
        if not target.startswith("https://"):
            assert (ROOT / page).parent.joinpath(target).exists(), target
    for path in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]+)`", PAGES[page]):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(?:\.{3})?([\w.-]*\d{8}T\d{6}Z)(?:\.json)?`", PAGES[page]):
        assert [found for found in RESULTS if found.endswith(name)], name


def test_the_reference_holds_every_public_name_and_pages_show_every_command():
    shown = [name for text in PAGES.values() for name in re.findall(r"^::: ([\w.]+)", text, re.MULTILINE)]
    for module in ("ops", "caches"):
        names = re.findall(r"^ {8}- (\w+)$", PAGES[f"docs/api/{module}.md"], re.MULTILINE)
        shown += [f"condense.{module}.{x}" for x in names]
    for name in shown:
        assert pkgutil.resolve_name(name).__doc__, name
    missing = set(condense.__all__) - {name.split(".")[-1] for name in shown} - {"__version__"}
    assert not missing, f"add ::: condense.{missing} to a page of docs/api"
    assert {line.split()[1] for line in COMMANDS} == set(typer.main.get_command(app).commands)


def test_the_readme_is_short_in_sentences_of_few_numbers_and_names_targets_of_make():
    assert len(README.splitlines()) <= 90
    for target in ("demo", "test"):
        assert re.search(rf"^make {target} ", README, re.MULTILINE)
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    prose = re.sub(r"^```.*?^```|^\|.*?$|\]\([^)]*\)", "", README, flags=re.MULTILINE | re.DOTALL)
    for sentence in re.split(r"[.:;] |\n\n|\n- ", prose):
        assert len(re.findall(r"(?<![a-z\d])\d[\d.,]*", re.sub(NAMES, "", sentence))) <= 3, sentence
    assert README.count(f" {readme_page.UNKNOWN} ") <= 2


def test_every_number_is_of_a_result_or_a_setting():
    # the table is compared with the results in benchmarks/test_measures.py
    parts = r"^```.*?^```|<!-- figures -->.*<!-- /figures -->|^\|.*?$"
    prose = re.sub(parts, "", README, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`", " ", prose)
    prose = re.sub(r"\s+", " ", prose.replace("[", "").replace("]", ""))
    for claim in readme_page.claims(stored.stored()):
        assert claim in prose
        prose = prose.replace(claim, "")
    assert re.findall(r"(?<![a-z\d])\d[\d.,]*", re.sub(NAMES, "", prose)) == []


@pytest.fixture(scope="module")
def fits():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config("qwen3-8b"))
    choices = {name: Method.parse(name) for name in NAMED_SETTINGS}
    fits = (cache_fits(model, choices, 131072, memory=80 * 10**9, host_memory=host) for host in (None, 512 * 10**9))
    free, limited = ({fit.name: fit for fit in of_host} for of_host in fits)
    return free | {"limited": limited["recall-host"]}


def kept(fit):
    return f"{fit.device_bytes / 2**30:.2f} GiB"


@pytest.mark.parametrize(("name", "of_row"), OF_ROWS.items())
def test_a_row_has_the_bytes_and_the_requests(name, of_row, fits):
    (row,) = (line for line in PAGE.splitlines() if line.startswith("|") and of_row in line)
    bytes_cell, requests_cell = (cell.strip() for cell in row.split("|")[3:5])
    host = f", and {fits[name].host_bytes / 2**30:.2f} GiB in host memory" if fits[name].host_bytes else ""
    assert bytes_cell == kept(fits[name]) + host
    fit = f"{fits['limited'].requests}, if the host has 512 GB" if host else f"{fits[name].requests}"
    assert requests_cell == fit


def test_the_prose_has_the_dense_caches_and_the_row_of_vllm_its_requests(fits):
    text = " ".join(PAGE.split())
    dense, four = fits["dense"], fits["dense, 4 bits"]
    assert f"keeps {kept(dense)} for one of them, so {dense.requests} fit" in text
    assert f"would take {kept(four)}: {four.requests} fit" in text
    assert len(re.findall(r"\d\.\d\d GiB", text)) == 8
    (row,) = (line for line in PAGE.splitlines() if line.startswith("|") and "`condense serve DIR`, which" in line)
    fit = fits["recall-device"]
    assert [cell.strip() for cell in row.split("|")[3:5]] == [f"{fit.served_bytes / 2**30:.2f} GiB", f"{fit.served}"]


def test_it_runs_and_shows_what_it_says(capsys):
    matplotlib.use("Agg")
    document = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    assert "CHARACTERS, STEPS, LENGTH =" in sources[0]
    # a reader sees what it gives without running it
    assert all(x["outputs"] for x in document["cells"] if x["cell_type"] == "code" and x["execution_count"] > 1)
    names = {}
    for source in ["CHARACTERS, STEPS, LENGTH = 4_000, 3, 192", *sources[1:]]:
        exec(compile(source, str(NOTEBOOK), "exec"), names)
    dense, learned, recall, window = names["outcomes"]
    assert dense.correct == recall.correct == len(names["keys"]) > 0
    assert window.correct < learned.correct
    assert learned.cache_bytes < dense.cache_bytes
    assert names["after"] < names["before"]
    assert "entries" in capsys.readouterr().out


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_it_is_the_librarys_function(changes):
    page = runpy.run_path(str(RECALL_PAGE))
    assert page["compare"](page["Settings"](**changes)) <= TOLERANCE


def test_it_runs_and_fits_on_a_page(capsys):
    runpy.run_path(str(RECALL_PAGE), run_name="__main__")
    assert float(capsys.readouterr().out.rpartition(" ")[2]) <= TOLERANCE
    assert len(RECALL_PAGE.read_text(encoding="utf-8").splitlines()) <= 100


def test_the_tables_of_a_backend_name_what_it_has():
    record, operations = PAGES["docs/guides/add-a-backend.md"].split("| operation | from | to |")
    for text, cls in ((record, Backend), (operations.partition("\n\n")[0], Operations)):
        named = [
            name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        ]
        assert {*named} == {name for name in cls.__annotations__ if name[0] != "_"}
