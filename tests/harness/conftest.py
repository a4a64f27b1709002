"""`condense eval` with lm-evaluation-harness itself, offline.

`make test-eval` runs this folder, in an environment of its own; without lm_eval installed it is not collected.
"""

import functools
import importlib.util
import json
import os
import sys

import pytest
import torch
from cli.test_commands import run_here
from transformers import LlamaConfig, LlamaForCausalLM

from condense.demo import demo_text

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
collect_ignore_glob = [] if HAS_LM_EVAL else ["test_*.py"]

if HAS_LM_EVAL:
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")


@pytest.fixture(scope="session", autouse=True)
def one_index():
    """The harness reads its 14,000 tasks' files once for all tests."""
    from lm_eval.tasks import manager as module

    build = module.TaskIndex.build
    with pytest.MonkeyPatch.context() as patch:
        cached = functools.cache(lambda paths: build(list(paths)))
        patch.setattr(module.TaskIndex, "build", lambda self, paths: dict(cached(tuple(paths))))
        yield


@pytest.fixture
def condense_line(monkeypatch):
    """`condense ARGUMENTS` in this process: its exit code, its output and its messages."""

    def run(*arguments, **options):
        monkeypatch.setattr(sys, "path", list(sys.path))
        done = run_here(*map(str, arguments), **options)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def command(condense_line):
    return functools.partial(condense_line, "eval")


# RULER's prompts have parts that must fit into 500 and into 4,096 tokens, so a tokenizer must know its words
RULER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. Memorize and track the "
    "chain(s) of variable assignment hidden in the following text. Find all variables that are assigned the value"
)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A random stock model in a folder, with a tokenizer made on the spot."""
    import wonderwords

    from condense.train import train_tokenizer

    words = " ".join(word for words in wonderwords.RandomWord()._categories.values() for word in words)
    tokenizer = train_tokenizer([demo_text().text, words, *[RULER] * 20], vocab_size=4000, max_positions=8192)
    tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }}\n{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8192, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "tiny"
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def copy_of_a_hub(folder, repository, configurations):
    """A data set's repository as a hub has it: a list of files in its card, and rows by configuration and split."""
    card = ["---", "configs:"]
    for name, splits in configurations.items():
        card += [f"- config_name: {name}", "  data_files:"]
        for split, rows in splits.items():
            write_lines(folder / repository / name / f"{split}.jsonl", rows)
            card += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / repository / "README.md").write_text("\n".join([*card, "---", ""]))


def scores(folder):
    found = json.loads((folder / "metrics.json").read_text())["results"]["scores"]
    return {(x["method"], x["task"], x["metric"], json.dumps(x["by"])): x for x in found}
