"""Scores are the harness's own; runs resume; saved models and adapters run as saved; bad input says what to do."""

import json
import shutil

import pytest
import torch
from harness.conftest import scores
from transformers import LlamaForCausalLM

import condense
from condense.evaluate.harness import OWN_FOLDER

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
]


def predictions(folder):
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    return {(x["method"], x["task"], x["doc_id"], x["filter"]): (x["prediction"], x["metrics"]) for x in lines}


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
    code, _, err = command(*arguments, "--output", output)
    assert code == 2
    assert "go on with --resume and a smaller --batch-size" in err.splitlines()[-1]
    assert command(*arguments, "--output", output, "--resume")[0] == 130
    assert not (output / "metrics.json").exists()
    swapped = (*TASKS, "--model", base, "--method", METHOD, "--method", "dense")
    for words, message in (
        (arguments, "--resume"),
        ((*arguments, "--limit", "2", "--resume"), "other settings"),
        ((*swapped, "--resume"), "other methods"),
    ):
        code, _, err = command(*words, "--output", output)
        assert code == 2
        assert message in err
    code, _, err = command(*arguments, "--output", output, "--resume")
    assert code == 0, err
    assert len(calls) == 6 + 2, "three of dense and one of the other were kept"
    assert predictions(output) == predictions(tmp_path / "whole")
    assert scores(output) == scores(tmp_path / "whole")
    code, _, err = command(*arguments, "--output", output, "--resume")
    assert code == 2
    assert "complete" in err


def test_a_tokenizer_s_own_code_runs_only_with_the_option(base, command, tmp_path):
    """Also where a task reads the tokenizer once more."""
    folder = shutil.copytree(base, tmp_path / "own")
    # a class of its own: transformers marks it as custom code for the rest of the process
    own = "from transformers import PreTrainedTokenizerFast\n\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    (folder / "own.py").write_text(own)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    arguments = (*TASKS, "--model", folder, "--method", "dense", "--output", tmp_path / "run")
    code, _, err = command(*arguments)
    assert code == 2
    assert "code which must be executed" in err
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
    code, _, err = command("--task", "text_loss", "--chat", "--output", tmp_path / "run")
    assert code == 2
    assert "with a chat template" in err.splitlines()[-1]


def test_an_unknown_task_is_refused_before_the_harness_s_index_and_the_model(command, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(TaskManager, "__init__", None)
    code, _, err = command("--task", "no_such_task", "--model", tmp_path, "--output", tmp_path / "run")
    assert code == 2
    assert "none called 'no_such_task'" in err
