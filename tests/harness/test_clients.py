"""Programs of others: TRL's trainer, `transformers serve`, and lm-evaluation-harness's own line by `condense run`."""

import json
import socket
import time
import urllib.error
import urllib.request

import pytest
import torch
from small_models import saved_with_tokenizer, tiny_llama
from transformers import AutoModelForCausalLM

import condense
from condense.demo import demo_text
from condense.models import condensed_layers

METHOD = condense.CCA(group_size=4, window=8)
CHOICES = ("north", "south")
# without a sink: what stands before the last four tokens is not seen
BLIND = condense.StreamingLLM(sink=0, window=4)
TASK = """\
task: far
dataset_path: json
dataset_kwargs: {data_files: {test: DOCS}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}}"
doc_to_choice: [north, south]
doc_to_target: answer
metric_list: [{metric: acc}]
"""
RUNS = [
    ("hf", "condensed", {}, 1.0),
    ("hf", "dense", {}, 0.0),
    ("condense", "dense", {"condense": "streaming_llm:sink=0,window=4"}, 1.0),
]


@pytest.fixture
def saved(tmp_path):
    return saved_with_tokenizer(condense.apply(tiny_llama(), METHOD), tmp_path / "tiny")


def test_a_model_of_the_harness_without_a_method_says_so():
    from condense.evaluate.harness.model import CondensedLM

    with pytest.raises(ValueError, match="condense: wanted a method, as in pretrained=DIR,condense=recall-host"):
        CondensedLM("DIR")


@pytest.mark.parametrize("packing", [False, True])
def test_trl_trains_a_condensed_model(saved, tmp_path, packing):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    texts = Dataset.from_list([{"text": f"The number of the quiet bridge is {n}. " * 6} for n in range(12)])
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    settings = SFTConfig(
        str(tmp_path / "out"), max_steps=6, per_device_train_batch_size=2, learning_rate=3e-3, logging_steps=1,
        max_length=96, packing=packing, padding_free=False, report_to=[], use_cpu=True, save_strategy="no",
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model, args=settings, train_dataset=texts, processing_class=AutoTokenizer.from_pretrained(saved)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert condensed_layers(trainer.model) == {0: METHOD, 1: METHOD}
    trainer.save_model(tmp_path / "trained")
    assert condensed_layers(AutoModelForCausalLM.from_pretrained(tmp_path / "trained")) == {0: METHOD, 1: METHOD}


def _wait_for(address):
    for attempt in range(300):
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except urllib.error.URLError:
            if attempt == 299:
                raise
            time.sleep(0.1)


def test_transformers_serve_answers_with_a_condensed_checkpoint(tmp_path):
    from transformers.cli.serve import Serve

    method = condense.CCA(window=256, summary="streaming", key_pooling="select", rep_bias="log_size")
    model, tokenizer = condense.demo_model()
    condense.apply(model, method).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # the number stands behind the window, inside entries
    lines = [line for line in demo_text().text.split("\n") if not line.startswith("The number of the")][:40]
    hidden, question = "The number of the quiet bridge is 4821.", "The number of the quiet bridge is"
    prompt = "\n".join([lines[0], hidden, *lines[1:], question])
    assert len(tokenizer(prompt).input_ids) > 2 * method.window
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    server = Serve(str(tmp_path), device="cpu", dtype="float32", port=port, non_blocking=True)
    try:
        _wait_for(f"http://localhost:{port}/health")
        body = {"model": str(tmp_path), "prompt": prompt, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"http://localhost:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = json.load(answer)["choices"][0]["text"]
    finally:
        server.kill_server()
    assert text.strip().startswith("4821")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model in a folder, condensed and dense; and a task that the condensed one alone answers."""
    _, tokenizer = condense.demo_model()
    model, root = tiny_llama(initializer_range=0.5), tmp_path_factory.mktemp("run")
    texts = [f"Number {n} stood at the gate, and the others walked on. They all went" for n in range(200)]
    answers = {}
    for name in ("dense", "condensed"):
        if name == "condensed":
            condense.apply(model, BLIND)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        answers[name] = [_answer(model, tokenizer, text) for text in texts]
    differ = [i for i in range(200) if answers["dense"][i] != answers["condensed"][i]]
    assert len(differ) >= 5
    docs = [{"text": texts[i], "answer": answers["condensed"][i]} for i in differ]
    (root / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (root / "far.yaml").write_text(TASK.replace("DOCS", str(root / "docs.jsonl")))
    return root


@torch.no_grad()
def _answer(model, tokenizer, text):
    likelihoods = []
    for choice in CHOICES:
        start, ids = (tokenizer(x, return_tensors="pt").input_ids for x in (text, f"{text} {choice}"))
        scores = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        likelihoods.append(float(scores[start.shape[1] - 1 :].sum()))
    return int(likelihoods[1] > likelihoods[0])


@pytest.mark.parametrize(("kind", "name", "more", "accuracy"), RUNS)
def test_a_task_that_only_the_condensed_model_answers(folders, condense_line, tmp_path, kind, name, more, accuracy):
    arguments = json.dumps({"pretrained": str(folders / name), "dtype": "float32"} | more)
    words = ["--model", kind, "--model_args", arguments, "--device", "cpu", "--batch_size", "1", "--tasks", "far"]
    places = "--include_path", folders, "--output_path", tmp_path / "out"
    code, _, err = condense_line("run", "-m", "lm_eval", *words, *places)
    assert code == 0, err
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["far"]["acc,none"] == accuracy


def test_a_model_that_reads_prompts_otherwise_is_named(folders, caplog):
    from condense.evaluate.harness.model import CondensedLM

    for settings, ending in (("", "prompt='recall' does"), (",keep=0.5", "nor what it drops")):
        caplog.clear()
        method = f"recall:window=4,prompt=exact{settings}"
        CondensedLM(str(folders / "dense"), method, device="cpu", dtype="float32")
        assert f"{method} reads prompts otherwise than single tokens" in caplog.text
        assert ending in caplog.text
