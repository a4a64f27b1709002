"""Our own tasks: what they ask and how they score."""

import json
from pathlib import Path

import lm_eval
import pytest
from harness.conftest import copy_of_a_hub, write_lines
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import AutoTokenizer

from condense.evaluate.harness import OWN_FOLDER
from condense.evaluate.harness.tasks import load_tasks

HARNESS = Path(lm_eval.__file__).parent / "tasks"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PROGRAMS = [
    ("def double(n):\n    return 2 * n", 1.0), ("def double(n):\n    return n", 0.0), ("def double(n):", 0.0),
    ("raise SystemExit(0)", 0.0), ("import time\ntime.sleep(9)", 0.0), ("\0", 0.0),
]  # fmt: skip
ANSWERS = [
    (r"\boxed{\frac12}", "0.5", False, True), (r"the answer is $\boxed{ 7 }$", "$7$", False, True),
    (r"\boxed{6} or rather \boxed{7}", "7", False, True), (r"\boxed{(1,2),(3,4)}", "(3,4),(1,2)", True, True),
    (r"\boxed{1,2}", "1,2,3", True, False), (r"\boxed{1,2,3}", "1,2", True, False),
    (r"\boxed{1,1}", "1,2", True, False), (r"\fbox{7}", "7", False, False), ("7", "7", False, False),
]  # fmt: skip


def documents(data, base, *lengths):
    metadata = {"tokenizer": str(base), "data": str(data)} | ({"max_seq_lengths": list(lengths)} if lengths else {})
    _, (task,) = load_tasks(["multidoc_em"], metadata, data=data, run_generated_code=False)
    return list(task.eval_docs)


@pytest.fixture
def questions(tmp_path):
    """Ten questions over three documents each, the second the right one; one distractor in ten has another's answer."""
    rows = []
    for n in range(10):
        far = [{"title": f"Far {n}.{i}", "text": f"Far {n}.{i}. {'Nobody knows of it. ' * 9}"} for i in range(3)]
        far[1] = {"title": "Place", "text": f"Number {n} is in town {n}.", "isgold": True}
        far[2]["text"] += f"Town {(n + 1) % 10}, it says."
        rows.append({"question": f"where is number {n}", "answers": [f"town {n}"], "ctxs": far})
    write_lines(tmp_path / "nq-open-3docs.jsonl", rows)
    return tmp_path


def test_documents_of_others_fill_a_prompt_around_the_right_one(questions, base):
    encoder = AutoTokenizer.from_pretrained(base)
    found = documents(questions, base, 512, 1024)
    assert [(x["length"], x["depth"]) for x in found] == [(n, d) for d in DEPTHS * 2 for n in ("512", "1024")]
    longest = len(encoder(f"Document [9999](Title: Far 9.9) {'Nobody knows of it. ' * 9}Town 9, it says.\n").input_ids)
    for doc in found:
        shown = doc["prompt"].split("\n\n")[1].splitlines()
        right = [n for n, line in enumerate(shown) if doc["answers"][0] in line.lower()]
        assert right == [round(doc["depth"] * (len(shown) - 1))], "no other document holds the answer"
        assert len(set(shown)) == len(shown)
        # 100 tokens are kept for the answer; one document more would not have fitted
        assert 0 <= int(doc["length"]) - 100 - len(encoder(doc["prompt"]).input_ids) < longest + len(shown)
    with pytest.raises(ValueError, match=r"the documents in --data fill \d+ tokens, wanted 131072"):
        documents(questions, base, 131072)


def test_without_a_length_documents_are_asked_as_given(questions, base):
    found = documents(questions, base)
    assert {(x["length"], x["depth"]) for x in found} == {("3 documents", 1)}
    assert found[0]["prompt"].startswith("Write a high-quality answer")
    assert "\n\nDocument [1](Title: Far 0.0) Far 0.0. Nobody" in found[0]["prompt"]
    assert found[0]["prompt"].endswith("\n\nQuestion: where is number 0\nAnswer:")
    rows = [json.loads(line) for line in (questions / "nq-open-3docs.jsonl").read_text().splitlines()]
    del rows[0]["ctxs"][1]["isgold"]
    write_lines(questions / "nq-open-3docs.jsonl", rows)
    with pytest.raises(ValueError, match="wanted a document with isgold for 'where is number 0'"):
        documents(questions, base)


def test_other_rows_under_the_same_card_are_read(tmp_path):
    for answer in ("1", "2"):
        rows = [{"question": "?", "answer": answer}]
        copy_of_a_hub(tmp_path, "openai/gsm8k", {"main": {"train": rows, "test": rows}})
        _, (task,) = load_tasks(["gsm8k"], {}, data=tmp_path, run_generated_code=False)
        assert [doc["answer"] for doc in task.eval_docs] == [answer]


def test_mbpp_is_the_harness_s_but_for_its_metric():
    files = (OWN_FOLDER / "mbpp.yaml", HARNESS / "mbpp" / "mbpp.yaml")
    ours, theirs = (load_yaml(file, resolve_func=False) for file in files)
    for own in ("fewshot_split", "fewshot_config", "metric_list"):
        ours.pop(own), theirs.pop(own, None)
    assert ours == theirs


@pytest.mark.parametrize(("program", "passes"), PROGRAMS)
def test_programs_must_get_past_their_tests(program, passes, monkeypatch):
    from condense.evaluate.harness.task_files import programs

    monkeypatch.setattr(programs, "SECONDS", 1.0)
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    with pytest.raises(ValueError, match="HF_ALLOW_CODE_EVAL=1"):
        programs.pass_at_1(["assert double(2) == 4"], [program])
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    assert programs.pass_at_1(["assert double(2) == 4"], [program]) == passes


@pytest.mark.parametrize(("said", "wanted", "several", "right"), ANSWERS)
def test_answers_of_olympiadbench(said, wanted, several, right):
    from condense.evaluate.harness.task_files.olympiad import scores

    doc = {"final_answer": [wanted], "is_multiple_answer": several}
    assert scores(doc, [said]) == {"exact_match": float(right)}
