"""LongBench and OlympiadBench from local files: the harness's own prompts and metrics, and what to do without data."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import condense

PASSAGES = "Passage 1:\nDogs have four legs.\n\nPassage 2:\nNow, answer: cats too."
HEAD = "Answer the question based on the given passages. Only give me the answer and do not output any other words."
ASKED = f"{HEAD}\n\nThe following are given passages.\n{PASSAGES}\n\n{HEAD}\n\nQuestion: How many legs?\nAnswer:"
CLASSES = {"all_classes": ["Animal", "Number"], "answers": ["Number"]}
MINI = [
    {"task": "hotpotqa", "index": 0, "origin_prompt": ASKED, "gold": ["four", "4"]},
    {"task": "qasper", "index": 0, "origin_prompt": ASKED, "gold": ["four"]},
    {"task": "lcc", "index": 0, "origin_prompt": "Please complete the code given below. \nx = 1\nNext line of code:\n",
     "gold": ["y = 2"]},
    {"task": "trec", "index": 0, "gold": CLASSES, "origin_prompt": "Please determine the type of the question below. "
     "Here are some examples of questions.\n\nQuestion: Who ?\nType: Animal\nQuestion: How many ?\nType:"},
]  # fmt: skip
OWN_FILE = {"input": "How many legs?", "context": PASSAGES, "answers": ["four"], "length": 9, "all_classes": None}
PROBLEM = {
    "question": "Find all real $x$ with $x^2=4$.", "final_answer": ["2,-2"], "is_multiple_answer": True, "unit": None,
    "answer_type": "Numerical", "subfield": "Algebra", "modality": "Text-only",
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random model in a folder, with the bundled tokenizer."""
    _, tokenizer = condense.demo_model()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "tiny"
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def data(tmp_path):
    """Files in the forms of the guide."""
    files = {
        "minilongbench": MINI,
        "longbench/hotpotqa_e": [OWN_FILE],
        "olympiadbench": [PROBLEM, PROBLEM | {"modality": "Multimodal"}],
    }
    for name, lines in files.items():
        path = tmp_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "data"


@pytest.fixture
def answers(monkeypatch):
    """The prompts that the harness asks, all of which the model is made to answer with one text."""
    from lm_eval.models.huggingface import HFLM

    asked = []

    def say(text):
        def generate(self, requests, **_):
            asked.extend(request.args[0] for request in requests)
            return [text] * len(requests)

        monkeypatch.setattr(HFLM, "generate_until", generate)
        return asked

    return say


def metrics(folder):
    found = json.loads((folder / "metrics.json").read_text())["results"]["scores"]
    return {(x["task"], x["metric"]): x["interval"]["value"] for x in found if not x["by"]}


@pytest.mark.parametrize(
    ("task", "answer", "metric", "score"),
    [
        ("longbench_hotpotqa", "Four legs.", "qa_f1_score", 2 / 3),
        ("longbench_hotpotqa_e", "Four.", "qa_f1_score", 1.0),
        ("longbench_qasper", "The four", "qa_f1_score", 1.0),
        ("longbench_lcc", "# next\ny = 2\n", "code_sim_score", 1.0),
        ("longbench_trec", "Number of something", "classification_score", 1.0),
        ("olympiadbench", r"So the final answer is \boxed{-2, 2}.", "exact_match", 1.0),
    ],
)
def test_prompts_and_scores_are_the_harness_s(base, command, data, answers, tmp_path, task, answer, metric, score):
    asked, output = answers(answer), tmp_path / "run"
    code, _, err = command("--task", task, "--model", base, "--data", data, "--output", output)
    assert code == 0, err
    assert len(asked) == 1
    mini = {f"longbench_{line['task']}": line["origin_prompt"].rstrip() for line in MINI if line["task"] != "qasper"}
    if task in mini:
        assert asked[0].rstrip() == mini[task]
    elif task == "longbench_qasper":
        assert asked[0].startswith("You are given a scientific article")
        assert asked[0].endswith("Question: How many legs?\n\nAnswer:")
        assert f"Article: {PASSAGES}\n" in asked[0]
    elif task == "olympiadbench":
        assert PROBLEM["question"] in asked[0]
        assert "several answers" in asked[0]
    else:
        assert asked[0] == ASKED
    assert metrics(output)[task, f"{metric},none"] == pytest.approx(score)


@pytest.mark.parametrize(
    ("said", "wanted", "several", "right"),
    [
        (r"\boxed{\frac12}", "0.5", False, True),
        (r"the answer is $\boxed{ 7 }$", "$7$", False, True),
        (r"\boxed{6} or rather \boxed{7}", "7", False, True),
        (r"\boxed{(1,2),(3,4)}", "(3,4),(1,2)", True, True),
        (r"\boxed{1,2}", "1,2,3", True, False),
        (r"\boxed{1,2,3}", "1,2", True, False),
        (r"\boxed{1,1}", "1,2", True, False),
        (r"\fbox{7}", "7", False, False),
        ("7", "7", False, False),
    ],
)
def test_answers_of_olympiadbench(said, wanted, several, right):
    from condense.evaluate.harness.task_files.olympiad import scores

    doc = {"final_answer": [wanted], "is_multiple_answer": several}
    assert scores(doc, [said]) == {"exact_match": float(right)}


@pytest.mark.parametrize(
    ("task", "messages"),
    [
        ("olympiadbench", ["olympiadbench*.jsonl", "hf download --repo-type dataset Hothan/OlympiadBench"]),
        ("longbench_qasper_e", ["longbench/qasper_e.jsonl", "hf download --repo-type dataset Xnhyacinth/LongBench"]),
        ("longbench_fewshot", ["longbench/triviaqa.jsonl", "has those of longbench_trec, which can be named"]),
        ("niah_single_2", ["--local-dir FOLDER/baber/paul_graham_essays"]),
    ],
)
def test_missing_data_are_named(base, command, data, tmp_path, task, messages):
    (data / "olympiadbench.jsonl").unlink()
    output = tmp_path / "run"
    code, _, err = command("--task", task, "--model", base, "--data", data, "--output", output)
    assert code == 2
    for message in messages:
        assert message in err.splitlines()[-1]
    assert not output.exists()


def test_a_prompt_of_another_form_is_named():
    from condense.evaluate.harness.longbench import longbench_row

    with pytest.raises(ValueError, match="line 3 of hotpotqa"):
        longbench_row(MINI[0] | {"index": 3, "origin_prompt": "What?"}, "hotpotqa", "test")
