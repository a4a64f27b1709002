"""The command line as a user meets it: the bundled model, files, pipes, and bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import condense
from condense.demo import demo_text

LINE = "The number of the quiet bridge is 4821."


def run(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "condense.cli.main", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, env=None)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "story.txt"
    lines = demo_text().text.splitlines()
    lines = [line for line in lines if not line.startswith("The number of")][:60]
    path.write_text("\n".join([*lines[:10], LINE, *lines[10:]]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A condensed model in a folder, with the bundled tokenizer."""
    _, tokenizer = condense.demo_model()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    model = condense.apply(LlamaForCausalLM(config), condense.LCA(group_size=4, window=8), layers=[1])
    path = tmp_path_factory.mktemp("model") / "tiny"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_compare_finds_the_number_dense_and_condensed(story: Path, tmp_path: Path) -> None:
    results, picture = tmp_path / "out.json", tmp_path / "out.png"
    question = "Question: What is the number of the quiet bridge?\nAnswer:"
    methods = (
        "dense",
        "cca:window=256,summary=streaming,key_pooling=select,rep_bias=log_size",
        "streaming_llm:window=40",
    )
    done = run(
        "compare", "--text", str(story), "--question", question, *(f"--method={m}" for m in methods),
        "--json", str(results), "--plot", str(picture),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(results.read_text())
    dense, condensed, window = document["results"]["outcomes"]
    assert dense["answers"][0].startswith("4821")
    assert condensed["answers"][0].startswith("4821")
    assert not window["answers"][0].startswith("4821")
    assert 0 < condensed["cache_bytes"] < dense["cache_bytes"]
    assert window["cache_bytes"] < condensed["cache_bytes"]
    assert document["provenance"]["torch"] == torch.__version__
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_compare_reads_standard_input_and_a_saved_model(saved: Path, story: Path) -> None:
    done = run("compare", "--model", str(saved), "--text", "-", "--max-new-tokens", "2", stdin=story.read_text())
    assert done.returncode == 0, done.stderr
    assert "LCA(group_size=4, window=8)" in done.stdout


def test_compare_keeps_existing_files(story: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("mine")
    done = run("compare", "--text", str(story), "--json", str(kept))
    assert done.returncode == 2
    assert str(kept) in done.stderr
    assert kept.read_text() == "mine"


def test_generate_prints_a_continuation(saved: Path) -> None:
    done = run("generate", "A walk by the sea", "--model", str(saved), "--method", "cca:group_size=4,window=4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_inspect_counts_what_a_cache_allocates(tmp_path: Path) -> None:
    results = tmp_path / "layers.json"
    method = "cca:window=256,summary=streaming,key_pooling=select"
    done = run("inspect", "--method", method, "--length", "4096", "--dtype", "float32", "--json", str(results))
    assert done.returncode == 0, done.stderr
    layers = json.loads(results.read_text())["results"]["layers"]
    model, _ = condense.demo_model()
    settings = condense.CCA(window=256, summary="streaming", key_pooling="select")
    with condense.use(model, settings), torch.no_grad():
        cache = model(torch.arange(4096).remainder(model.config.vocab_size)[None], logits_to_keep=1).past_key_values
    assert sum(layer["bytes"] for layer in layers) == condense.cache_nbytes(cache)
    assert all(layer["flops"] < layer["dense_flops"] for layer in layers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "--text", "missing.txt"), "text: no such file"),
        (("compare", "--question", "Who?"), "question needs a text"),
        (("compare", "--method", "cca:group_size=0"), "group_size must be an integer >= 1"),
        (("compare", "--method", "cca:group_size=1.5"), "group_size must be an integer >= 1"),
        (("compare", "--method", "cca:size=3"), "unknown settings"),
        (("compare", "--method", "cca:window"), "name=value"),
        (("compare", "--method", "nonsense"), "method must be one of"),
        (("compare", "--model", "./missing"), "model: no such folder"),
        (("compare", "--dtype", "int4"), "dtype must be one of"),
        (("compare", "--device", "abacus"), "device must be"),
        (("compare", "--plot", "picture.doc"), "plot must end in"),
        (("compare", "--max-new-tokens", "0"), "max_new_tokens"),
        (("generate",), "prompt"),
        (("generate", "a", "--text", "b"), "prompt"),
        (("generate", ""), "prompt must not be empty"),
        (("inspect", "--length", "0"), "length must be an integer >= 1"),
        (("train", "nonsense", "--data", "a", "--output", "b"), "recipe must be one of"),
        (("train", "smoke", "--data", "missing.txt", "--output", "b"), "missing.txt"),
        (("train", "adapt", "--data", "a", "--output", "b"), "--pretrained"),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "condense.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_empty_text_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(text)
    done = run("compare", "--text", str(path))
    assert done.returncode == 2
    assert done.stderr.strip().endswith("is empty")
    assert len(done.stderr.strip().splitlines()) == 1


def test_learned_positions_limit_the_prompt(tmp_path: Path, story: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    _, tokenizer = condense.demo_model()
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    done = run("compare", "--model", str(tmp_path / "gpt2"), "--text", str(story))
    assert done.returncode == 2
    assert "64 learned positions" in done.stderr
