"""lm-evaluation-harness's own command line, started by `condense run`, scores a condensed folder as condensed."""

import json

import pytest
import torch
from small_models import tiny_llama

import condense

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
    """The choice with the higher likelihood after a text."""
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
