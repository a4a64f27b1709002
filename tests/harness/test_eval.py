"""Scores are the harness's own; runs resume; saved models and adapters run as saved; bad input says what to do."""

import json
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import condense
from condense.evaluate.harness import OWN_FOLDER

METHOD = "cca:group_size=4,window=16"
TASKS = ("--task", "multikey_retrieval", "--task", "text_loss", "--length", "512", "--limit", "3")
GSM8K = {"question": "How many legs have three dogs?", "answer": "3 * 4 = <<3*4=12>>12\n#### 12"}
MMLU = {"subject": "virology", "question": "Which is one?", "choices": ["a", "b", "c", "d"], "answer": "C"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A stock model in a folder, with the bundled tokenizer."""
    _, tokenizer = condense.demo_model()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "tiny"
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def predictions(folder):
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    return {(x["method"], x["task"], x["doc_id"], x["filter"]): (x["prediction"], x["metrics"]) for x in lines}


def scores(folder):
    found = json.loads((folder / "metrics.json").read_text())["results"]["scores"]
    return {(x["method"], x["task"], x["metric"], json.dumps(x["by"])): x for x in found}


def test_outside_of_a_repository_git_does_not_complain(base, command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    arguments = ("--task", "text_loss", "--length", "512", "--limit", "1", "--method", "dense")
    assert command(*arguments, "--model", base, "--output", tmp_path / "run")[0] == 0
    assert "fatal" not in capfd.readouterr().err


def test_scores_are_the_harness_s_own(base, command, tmp_path):
    import lm_eval
    from lm_eval.tasks import TaskManager

    output = tmp_path / "run"
    code, _, err = command(*TASKS, "--model", base, "--method", "dense", "--method", METHOD, "--output", output)
    assert code == 0, err
    found = scores(output)
    metadata = {"tokenizer": str(base), "max_seq_lengths": [512]}
    manager = TaskManager(include_path=OWN_FOLDER, include_defaults=False, metadata=metadata)
    expected = lm_eval.simple_evaluate(
        "hf",
        model_args={"pretrained": str(base), "dtype": "float32", "device": "cpu"},
        tasks=["multikey_retrieval", "text_loss"],
        task_manager=manager,
        limit=3,
        bootstrap_iters=0,
    )["results"]
    for task, metric in (
        ("multikey_retrieval", "exact_match"),
        ("text_loss", "nats_per_token"),
        ("text_loss", "perplexity"),
    ):
        dense, condensed = (found[method, task, f"{metric},none", "{}"] for method in ("dense", METHOD))
        assert dense["harness"] == expected[task][f"{metric},none"]
        assert dense["interval"]["value"] == pytest.approx(dense["harness"], rel=1e-12)
        assert dense["interval"]["n"] == condensed["interval"]["n"] > 0
    loss = [found[method, "text_loss", "nats_per_token,none", "{}"]["harness"] for method in ("dense", METHOD)]
    assert loss[0] != loss[1]
    page = (output / "report.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    env = json.loads((output / "env.json").read_text())
    assert env["run"]["methods"][METHOD]["group_size"] == 4


def test_saved_models_and_adapters_run_as_saved(base, command, tmp_path):
    from peft import LoraConfig, get_peft_model

    def load():
        return LlamaForCausalLM.from_pretrained(base)

    condense.apply(load(), METHOD).save_pretrained(tmp_path / "condensed")
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian", task_type="CAUSAL_LM")
    get_peft_model(condense.apply(load(), METHOD), lora).save_pretrained(tmp_path / "adapter")
    for folder in ("condensed", "adapter"):
        condense.demo_model()[1].save_pretrained(tmp_path / folder)
        output = tmp_path / f"{folder}-run"
        code, _, err = command(
            "--task", "text_loss", "--length", "512", "--model", tmp_path / folder, "--output", output
        )
        assert code == 0, err
        assert json.loads((output / "env.json").read_text())["run"]["methods"] == {
            str(condense.Method.parse(METHOD)): condense.Method.parse(METHOD).to_dict()
        }
    output = tmp_path / "by-method"
    assert (
        command("--task", "text_loss", "--length", "512", "--model", base, "--method", METHOD, "--output", output)[0]
        == 0
    )
    saved, chosen = ([x[1] for x in predictions(tmp_path / name).values()] for name in ("condensed-run", "by-method"))
    assert saved == chosen


def test_an_interrupted_run_goes_on_and_scores_the_same(base, command, tmp_path, monkeypatch):
    arguments = (*TASKS, "--model", base, "--method", "dense", "--method", METHOD)
    assert command(*arguments, "--output", tmp_path / "whole")[0] == 0
    calls, generate = [], LlamaForCausalLM.generate

    def stops(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "generate", stops)
    output = tmp_path / "parts"
    assert command(*arguments, "--output", output)[0] == 130
    assert not (output / "metrics.json").exists()
    code, _, err = command(*arguments, "--output", output)
    assert code == 2
    assert "--resume" in err
    code, _, err = command(*arguments, "--limit", "2", "--output", output, "--resume")
    assert code == 2
    assert "other settings" in err
    swapped = (*TASKS, "--model", base, "--method", METHOD, "--method", "dense")
    code, _, err = command(*swapped, "--output", output, "--resume")
    assert code == 2
    assert "other methods" in err
    code, _, err = command(*arguments, "--output", output, "--resume")
    assert code == 0, err
    assert len(calls) == 5 + 2, "three of dense and one of the other were kept"
    assert predictions(output) == predictions(tmp_path / "whole")
    assert scores(output) == scores(tmp_path / "whole")
    code, _, err = command(*arguments, "--output", output, "--resume")
    assert code == 2
    assert "complete" in err


def test_a_report_that_was_not_written_is_written_from_the_scores(base, command, tmp_path, monkeypatch):
    from condense.cli import eval as module
    from condense.evaluate import harness

    def full(*args):
        raise OSError(28, "No space left on device")

    output, write = tmp_path / "run", harness.write_report
    arguments = ("--task", "text_loss", "--length", "512", "--model", base, "--output", output)
    monkeypatch.setattr(harness, "write_report", full)
    assert command(*arguments)[0] != 0
    saved = (output / "metrics.json").read_bytes()
    assert not (output / "report.html").exists()
    monkeypatch.setattr(harness, "write_report", write)
    monkeypatch.setattr(module, "load_model", None)  # what is drawn is in the folder
    code, out, err = command(*arguments, "--resume")
    assert code == 0, err
    assert "nats_per_token" in out
    assert "<svg" in (output / "report.html").read_text()
    assert (output / "metrics.json").read_bytes() == saved
    code, _, err = command(*arguments, "--resume")
    assert code == 2
    assert "complete" in err


def test_out_of_memory_halves_the_batch_once(base, command, tmp_path, monkeypatch):
    sizes, generate = [], LlamaForCausalLM.generate

    def full_above(most):
        def limited(self, input_ids, **kwargs):
            sizes.append(len(input_ids))
            if len(input_ids) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return generate(self, input_ids=input_ids, **kwargs)

        monkeypatch.setattr(LlamaForCausalLM, "generate", limited)

    arguments = (
        "--task",
        "multikey_retrieval",
        "--length",
        "512",
        "--limit",
        "4",
        "--model",
        base,
        "--batch-size",
        "4",
    )
    full_above(2)
    code, _, err = command(*arguments, "--output", tmp_path / "half")
    assert code == 0, err
    assert sizes == [4, 2, 2]
    full_above(1)
    code, _, err = command(*arguments, "--output", tmp_path / "none")
    assert code == 2
    assert "batches of 2" in err
    assert "--resume" in err


def test_ruler_at_4k_on_the_bundled_model(command, tmp_path):
    output = tmp_path / "run"
    code, _, err = command("--task", "niah_single_1", "--limit", "1", "--max-length", "4096", "--output", output)
    assert code == 0, err
    found = [x for x in scores(output).values() if x["task"] == "niah_single_1"]
    assert [x["metric"] for x in found] == ["4096,none", "4096,none"]
    assert all(0 <= x["interval"]["value"] == x["harness"] <= 1 and x["interval"]["n"] == 1 for x in found)


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


@pytest.fixture
def data(tmp_path):
    """Local files in the forms of the guide."""
    folder = tmp_path / "data"
    folder.mkdir()
    ctxs = [{"title": "Dogs", "text": "Dogs have four legs.", "isgold": True}, {"title": "Cats", "text": "Cats too."}]
    question = {"question": "how many legs have dogs", "answers": ["four"], "ctxs": ctxs}
    files = {
        "gsm8k-test": [GSM8K] * 2,
        "gsm8k-train": [GSM8K] * 6,
        "mmlu-all": [MMLU | {"split": split} for split in ("dev", "test")],
        "nq-open-2docs": [question] * 2,
    }
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_local_files_stand_for_the_hub(base, command, data, tmp_path):
    tasks = ("gsm8k", "mmlu_virology", "multidoc_em")
    code, _, err = command(
        *(f"--task={task}" for task in tasks), "--model", base, "--data", data, "--output", tmp_path / "run"
    )
    assert code == 0, err
    assert {key[1] for key in scores(tmp_path / "run")} == set(tasks)
    targets = {
        json.loads(line)["task"]: json.loads(line)["target"] for line in (tmp_path / "run/predictions.jsonl").open()
    }
    assert targets == {"gsm8k": GSM8K["answer"], "mmlu_virology": 2, "multidoc_em": ["four"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "gsm8"), "gsm8k"),
        (("--task", "multikey_retrieve"), "close: multikey_retrieval"),
        (("--task", "text_loss", "--method", "caa"), "close: lca, cca"),
        (("--task", "multidoc_em"), "lost-in-the-middle"),
        (("--task", "gsm8k"), "hf download --repo-type dataset openai/gsm8k"),
        (("--task", "gsm8k"), "gsm8k-test*.jsonl"),
        (("--task", "mbpp"), "--run-generated-code"),
        (("--task", "text_loss", "--method", "dga:selection=prompt", "--batch-size", "2"), "batch size must be 1"),
        (("--task", "text_loss", "--data", "nowhere"), "data: wanted a folder"),
        (("--task", "text_loss", "--length", "100000"), "documents of at least 100000 tokens"),
        (("--task", "text_loss", "--chat"), "with a chat template"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(base, command, tmp_path, arguments, message):
    output = tmp_path / "run"
    code, _, err = command(*arguments, "--model", base, "--output", output)
    assert code == 2
    assert message in err.splitlines()[-1]
    assert not output.exists()
