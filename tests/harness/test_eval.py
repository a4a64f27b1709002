"""Runs of `condense eval`, whose scores are the harness's own; and our own tasks: what they ask and how they score."""

import json
import shutil
from pathlib import Path

import lm_eval
import pytest
import torch
from harness.conftest import copy_of_a_hub, scores, write_lines
from lm_eval.tasks._yaml_loader import load_yaml
from models import tiny
from transformers import AutoTokenizer, LlamaForCausalLM

import condense
from condense.evaluate.harness import OWN_FOLDER
from condense.evaluate.harness.tasks import load_tasks
from condense.files import sole_writer

METHOD = "cca:group_size=4,window=16"
TASKS = ("--task", "multikey_retrieval", "--task", "text_loss", "--length", "512", "--limit", "3")
BAD = [
    (("--task", "gsm8"), "gsm8k"),
    (("--task", "question"), "the harness has none called 'question'"),  # a word in many of its files
    (("--task", "multikey_retrieve"), "close: multikey_retrieval"),
    (("--task", "text_loss", "--method", "caa"), "close: lca, cca"),
    (("--task", "multidoc_em"), "lost-in-the-middle"),
    (("--task", "gsm8k"), "hf download --repo-type dataset openai/gsm8k"),
    (("--task", "mbpp_instruct"), "--run-generated-code"),
    (("--task", "text_loss", "--method", "dga:selection=prompt", "--batch-size", "2"), "batch size must be 1"),
    (("--task", "text_loss", "--data", "nowhere"), "data: wanted a folder"),
    (("--task", "text_loss", "--length", "100000"), "documents of at least 100000 tokens"),
    (("--task", "text_loss", "--length", "512", "--length", "200"), "wanted a length above 258 tokens"),
    (("--task", "multikey_retrieval", "--length", "100"), "to have room for text, got 100"),
]


def predictions(folder):
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    return {(x["method"], x["task"], x["doc_id"], x["filter"]): (x["prediction"], x["metrics"]) for x in lines}


def refused(message, command, *arguments):
    code, _, err = command(*arguments)
    assert code == 2
    assert message in err


def test_outside_of_a_repository_git_does_not_complain(base, command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    arguments = ("--task", "text_loss", "--length", "512", "--limit", "1", "--method", "dense")
    assert command(*arguments, "--model", base, "--output", tmp_path / "run")[0] == 0
    assert "fatal" not in capfd.readouterr().err


def test_scores_are_the_harness_s_own(base, command, tmp_path):
    import lm_eval
    from lm_eval.tasks import TaskManager

    output = tmp_path / "run"
    code, out, err = command(*TASKS, "--model", base, "--method", "dense", "--method", METHOD, "--output", output)
    assert code == 0, err
    assert "text_loss position" in out
    found = scores(output)
    metadata = {"tokenizer": str(base), "max_seq_lengths": [512]}
    expected = lm_eval.simple_evaluate(
        "hf",
        model_args={"pretrained": str(base), "dtype": "float32", "device": "cpu"},
        tasks=["multikey_retrieval", "text_loss"],
        task_manager=TaskManager(include_path=OWN_FOLDER, include_defaults=False, metadata=metadata),
        limit=3,
    )["results"]
    for task, metric in (("multikey_retrieval", "exact_match"), ("text_loss", "nats_per_token")):
        dense, condensed = (found[method, task, f"{metric},none", "{}"] for method in ("dense", METHOD))
        assert dense["value"] == expected[task][f"{metric},none"]
        error = expected[task][f"{metric}_stderr,none"]
        assert dense["stderr"] == (None if error == "N/A" else pytest.approx(error, rel=1e-12))
        assert dense["n"] == condensed["n"] == (3 if task == "multikey_retrieval" else 1)
    loss = [found[method, "text_loss", "nats_per_token,none", "{}"]["value"] for method in ("dense", METHOD)]
    assert loss[0] != loss[1]
    depths = [x["value"] for key, x in found.items() if "depth" in key[3] and key[0] == "dense"]
    assert sum(depths) / len(depths) == found["dense", "multikey_retrieval", "exact_match,none", "{}"]["value"]
    assert json.loads((output / "env.json").read_text())["run"]["methods"][METHOD]["group_size"] == 4


def test_saved_models_and_adapters_run_as_saved(base, command, tmp_path):
    from peft import LoraConfig, get_peft_model

    def load():
        return LlamaForCausalLM.from_pretrained(base)

    condense.apply(load(), METHOD).save_pretrained(tmp_path / "condensed")
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian", task_type="CAUSAL_LM")
    get_peft_model(condense.apply(load(), METHOD), lora).save_pretrained(tmp_path / "adapter")
    arguments = ("--task", "text_loss", "--length", "512")
    for folder in ("condensed", "adapter"):
        condense.demo_model()[1].save_pretrained(tmp_path / folder)
        for file in base.glob("token*"):
            shutil.copy(file, tmp_path / folder)
        output = tmp_path / f"{folder}-run"
        code, _, err = command(*arguments, "--model", tmp_path / folder, "--output", output)
        assert code == 0, err
        method = condense.Method.parse(METHOD)
        assert json.loads((output / "env.json").read_text())["run"]["methods"] == {str(method): method.to_dict()}
    assert command(*arguments, "--model", base, "--method", METHOD, "--output", tmp_path / "by-method")[0] == 0
    saved, chosen = ([x[1] for x in predictions(tmp_path / name).values()] for name in ("condensed-run", "by-method"))
    assert saved == chosen


def test_an_interrupted_run_goes_on_and_scores_the_same(base, command, tmp_path, monkeypatch):
    arguments = (*TASKS, "--model", base, "--method", "dense", "--method", METHOD)
    assert command(*arguments, "--output", tmp_path / "whole")[0] == 0
    calls, generate = [], LlamaForCausalLM.generate

    def stops(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if len(calls) == 6:
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "generate", stops)
    output = tmp_path / "parts"
    refused("go on with --resume and a smaller --batch-size", command, *arguments, "--output", output)
    assert command(*arguments, "--output", output, "--resume")[0] == 130
    assert not (output / "metrics.json").exists()
    with sole_writer(output):
        refused("a running process writes", command, *arguments, "--output", output, "--resume")
    swapped = (*TASKS, "--model", base, "--method", METHOD, "--method", "dense")
    for words, message in (
        (arguments, "--resume"),
        ((*("2" if word == "3" else word for word in arguments), "--resume"), "other settings"),
        ((*swapped, "--resume"), "other methods"),
    ):
        refused(message, command, *words, "--output", output)
    code, _, err = command(*arguments, "--output", output, "--resume")
    assert code == 0, err
    assert len(calls) == 6 + 2, "three of dense and one of the other were kept"
    assert predictions(output) == predictions(tmp_path / "whole")
    assert scores(output) == scores(tmp_path / "whole")
    refused("complete", command, *arguments, "--output", output, "--resume")
    refused("other methods", command, *swapped, "--output", output, "--resume")


def test_a_tokenizer_s_own_code_runs_only_with_the_option(base, command, tmp_path):
    folder = shutil.copytree(base, tmp_path / "own")
    # a class of its own: transformers marks it as custom code for the rest of the process
    own = "from transformers import PreTrainedTokenizerFast\n\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    (folder / "own.py").write_text(own)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    arguments = (*TASKS, "--model", folder, "--method", "dense", "--output", tmp_path / "run")
    refused("code which must be executed", command, *arguments)
    code, _, err = command(*arguments, "--trust-remote-code")
    assert code == 0, err


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_that_says_what_to_do(base, command, tmp_path, arguments, message):
    output = tmp_path / "run"
    code, _, err = command(*arguments, "--model", base, "--output", output)
    assert code == 2
    assert message in err.splitlines()[-1]
    assert not output.exists()


def test_a_chat_needs_a_template(command, tmp_path):
    refused("with a chat template", command, "--task", "text_loss", "--chat", "--output", tmp_path / "run")


def test_an_unknown_task_is_refused_before_the_harness_s_index_and_the_model(command, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(TaskManager, "__init__", None)
    words = ("--task", "no_such_task", "--model", tmp_path, "--output", tmp_path / "run")
    refused("none called 'no_such_task'", command, *words)


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
    tiny.refused(r"the documents in --data fill \d+ tokens, wanted 131072", documents, questions, base, 131072)
    tiny.refused(r"wanted a length above \d+ tokens, .* got 100", documents, questions, base, 100)


def test_without_a_length_documents_are_asked_as_given(questions, base):
    found = documents(questions, base)
    assert {(x["length"], x["depth"]) for x in found} == {("3 documents", 1)}
    assert found[0]["prompt"].startswith("Write a high-quality answer")
    assert "\n\nDocument [1](Title: Far 0.0) Far 0.0. Nobody" in found[0]["prompt"]
    assert found[0]["prompt"].endswith("\n\nQuestion: where is number 0\nAnswer:")
    rows = [json.loads(line) for line in (questions / "nq-open-3docs.jsonl").read_text().splitlines()]
    del rows[0]["ctxs"][1]["isgold"]
    write_lines(questions / "nq-open-3docs.jsonl", rows)
    tiny.refused("wanted a document with isgold for 'where is number 0'", documents, questions, base)


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
    tiny.refused("HF_ALLOW_CODE_EVAL=1", programs.pass_at_1, ["assert double(2) == 4"], [program])
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    assert programs.pass_at_1(["assert double(2) == 4"], [program]) == passes


@pytest.mark.parametrize(("said", "wanted", "several", "right"), ANSWERS)
def test_answers_of_olympiadbench(said, wanted, several, right):
    from condense.evaluate.harness.task_files.olympiad import scores

    doc = {"final_answer": [wanted], "is_multiple_answer": several}
    assert scores(doc, [said]) == {"exact_match": float(right)}
