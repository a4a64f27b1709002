"""The commands of docs/studies/results.md, in their order: a tiny model is adapted, then scored on three rows of data.

Names and lengths are put in as a user would; the harness loads the data by its own means, from copies of hubs'
repositories with the columns that it reads there.
"""

import json
import re
import shlex
from pathlib import Path

import analyze.command
import lm_eval
import pytest
from harness.conftest import copy_of_a_hub, scores, write_lines

from condense.demo import demo_text
from condense.evaluate.harness.tasks import load_tasks

PAGE = (Path(__file__).parents[2] / "docs" / "studies" / "results.md").read_text(encoding="utf-8")
COMMANDS = {
    int(n): shlex.split(line)[1:] for line, n in re.findall(r"^((?:condense|python) .*)  # (\d)", PAGE, re.MULTILINE)
}
# what a tiny model needs beside what the page says
MORE = {
    1: "--steps 1 --sequence-length 1056 --workers 0", 7: "--method lca:window=16",
    8: "--sink 16 --window 64",
}  # fmt: skip
SINGLE = [(3, "multidoc_em", "best_subspan_em"), (6, "olympiadbench", "exact_match")]
SUBJECTS = {
    re.search(r"dataset_name\W+(\w+)", file.read_text())[1]
    for file in (Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default").glob("mmlu_*.yaml")
}
COLUMNS = {
    "single": ("qasper", "multifieldqa_en"), "multi": ("hotpotqa", "2wikimqa"),
    "summarization": ("gov_report", "multi_news"), "fewshot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"), "code": ("lcc", "repobench-p"),
}  # fmt: skip
LINES = [line for line in demo_text().text.split("\n") if line]


def longbench(root):
    fixed = {"length": 12, "language": "en", "dataset": "", "_id": "0", "question": "Where?"}
    rows = [
        fixed | {"context": line, "answers": [f"Paragraph {n}"], "all_classes": [f"Paragraph {n}", "none"]}
        for n, line in enumerate(LINES[:3])
    ]
    names = [f"{name}_e" for column in COLUMNS.values() for name in column]
    copy_of_a_hub(root, "Xnhyacinth/LongBench", {name: {"test": rows} for name in names})


def multidoc(root):
    def document(title, text, right):
        return {"title": title, "text": text, "hasanswer": right, "isgold": right}

    others = [document(f"Page {n}", f"{n} {' '.join(LINES[n::12])}", False) for n in range(12)]
    rows = [
        {"question": f"where is {n}", "answers": [f"town{n}"], "nq_annotated_gold": {},
         "ctxs": [document(f"{n}", f"It is in town{n}.", True), *others[n::3]]}
        for n in range(3)
    ]  # fmt: skip
    write_lines(root / "nq-open-5_total_documents_gold_at_0.jsonl", rows)


def ruler(root):
    copy_of_a_hub(root, "baber/paul_graham_essays", {"default": {"train": [{"text": demo_text().text}] * 3}})
    for file in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        write_lines(root / "nltk_data" / "tokenizers" / "punkt_tab" / "english" / file, [])
    # RULER takes 500 questions of each set, so that a row has many
    answers = [{"text": "far", "answer_start": 0}]
    asked = [{"id": f"{n}", "question": f"{n}?", "answers": answers, "is_impossible": False} for n in range(170)]
    articles = [{"title": line, "paragraphs": [{"context": line, "qas": asked}]} for line in LINES[:3]]
    (root / "dev-v2.0.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    context = [[line[:9], [line]] for line in LINES[:10]]
    hotpot = {"answer": "far", "context": context, "type": "bridge", "level": "hard"}
    rows = [hotpot | {"_id": f"{n}", "question": f"{n}?", "supporting_facts": []} for n in range(500)]
    (root / "hotpot_dev_distractor_v1.json").write_text(json.dumps(rows))


def short_tasks(root):
    fixed = {"subject": "", "choices": list("wxyz")}
    asked = [fixed | {"question": line, "answer": n} for n, line in enumerate(LINES[:3])]
    examples = [fixed | {"question": line, "answer": 0} for line in LINES[3:9]]
    splits = {"test": asked, "validation": asked, "dev": examples}
    copy_of_a_hub(root, "cais/mmlu", dict.fromkeys(sorted(SUBJECTS), splits))
    sums = [{"question": f"What is {n} and 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(12)]
    copy_of_a_hub(root, "openai/gsm8k", {"main": {"train": sums[3:], "test": sums[:3]}})
    programs = [
        {"task_id": n, "text": f"Add {n}.", "code": f"def add(x):\r\n  return x + {n}", "test_setup_code": "",
         "test_list": [f"assert add({x}) == {x + n}" for x in range(3)], "challenge_test_list": []}
        for n in (1, 2, 3, 4, 11, 12, 13)
    ]  # fmt: skip
    copy_of_a_hub(root, "google-research-datasets/mbpp", {"full": {"prompt": programs[:4], "test": programs[4:]}})


def olympiadbench(root):
    fixed = {"subject": "Math", "language": "English", "modality": "Text-only", "answer_type": "Numerical"}
    rows = [
        fixed | {"id": n, "question": f"Find $x$ with $x={n}$.", "solution": [""], "final_answer": [f"{n}"],
                 "is_multiple_answer": False, "subfield": "Algebra", "unit": None, "context": None, "error": None}
        for n in range(3)
    ]  # fmt: skip
    copy_of_a_hub(root, "Hothan/OlympiadBench", {"OE_TO_maths_en_COMP": {"train": rows}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for write in (longbench, multidoc, ruler, short_tasks, olympiadbench):
        write(root)
    return root


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The folder where the commands run, with the texts that they name."""
    path = tmp_path_factory.mktemp("here")
    write_lines(path / "text.jsonl", [{"text": demo_text().text}] * 3)
    (path / "a.txt").write_text(demo_text().text)
    return path


@pytest.fixture
def run(base, folder, here, condense_line, monkeypatch):
    """A command of the page by its number: the scores in its folder, if it has one."""
    monkeypatch.chdir(here)
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    names = {"MODEL": base, "moonshotai/Kimi-Linear-48B-A3B-Base": base, "FOLDER": folder, "30000": 256}
    names |= {str(2**n): 4096 for n in range(13, 18)}  # each length is the shortest one

    def run(number):
        words = [names.get(word, word) for word in COMMANDS[number]]
        if "--max-length" in words:
            words[words.index("--max-length") + 1] = 1024
        more = MORE.get(number, "--limit 1" if words[0] == "eval" else "").split()
        if words[0] == "benchmarks/analyze":
            code, _, err = condense_line(*words[1:], *more, entry=analyze.command.main)
        else:
            code, _, err = condense_line(*words, *more)
        assert code == 0, err
        if words[0] != "eval":
            return {}
        found = scores(Path(words[words.index("--output") + 1]))
        return {(task, metric.partition(",")[0]): x for (_, task, metric, by), x in found.items() if by == "{}"}

    return run


def test_adapting_is_the_first_of_nine_commands(run, here):
    assert list(COMMANDS) == list(range(1, 10))
    run(1)
    adapted = json.loads((here / "ADAPTED" / "config.json").read_text())
    assert adapted["condense"]["methods"][0]["method"]["window"] == 1024


def test_longbench_e_has_six_columns(run, folder):
    found = run(2)
    each = [found[f"longbench_{name}_e", "score"]["value"] for column in COLUMNS.values() for name in column]
    assert found["longbench_e", "score"]["value"] == pytest.approx(sum(each) / 13)
    for column, names in COLUMNS.items():
        parts = [found[f"longbench_{name}_e", "score"]["value"] for name in names]
        assert found[f"longbench_{column}_e", "score"]["value"] == pytest.approx(sum(parts) / len(parts))
    _, tasks = load_tasks(["longbench_e", "longbench_code_e"], {}, data=folder, run_generated_code=False)
    assert [each.name for each in tasks] == ["longbench_e"], "a part of a group that is named too is scored once"


@pytest.mark.parametrize(("number", "task", "metric"), SINGLE)
def test_single_tasks(run, number, task, metric):
    assert run(number)[task, metric]["n"] == 1


def test_ruler(run):
    found = {task: x for (task, metric), x in run(4).items() if metric == "4096"}
    assert len(found) == 14
    assert found.pop("ruler")["value"] == pytest.approx(sum(x["value"] for x in found.values()) / 13)


def test_short_tasks(run):
    found = run(5)
    assert found["mmlu", "acc"]["n"] == 57
    assert {("mmlu_stem", "acc"), ("gsm8k", "exact_match"), ("mbpp", "pass_at_1")} <= found.keys()


def test_analyses(run, here):
    run(7)
    run(8)
    assert (here / "deviation.json").is_file()
    assert (here / "patterns.json").is_file()


def test_a_model_of_its_authors(run):
    assert {"longbench_e", "ruler"} <= {task for task, _ in run(9)}
