"""Training runs: resumed, adapted and refused ones, what is drawn, optimiser, phases, checkpoints, tokenizer."""

import copy
import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from models import tiny
from safetensors.torch import load_file
from small_models import saved_with_tokenizer, tiny_llama
from train.runs import METHOD, adaptation, interrupted_at, logged, refused
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import condense
from condense.files import sole_writer
from condense.models import condensed_layers
from condense.models.inspect import inspect
from condense.results import plain
from condense.tasks import SequenceBuilder, load_words
from condense.train import RECIPES, PhaseConfig, prepare, run, run_training, train_tokenizer
from condense.train import trainer as trainer_module
from condense.train.data import TrainingSequences
from condense.train.optimizer import MasterAdamW
from condense.train.phase import newest_checkpoint
from condense.train.trainer import COMPLETE, MixedTrainer

CONDENSED = {"mix": "condensed", "method": METHOD}
UNTRAINED = [
    ("llama", condense.CCA(summary="prompt"), "lets tokens depend on later ones"),
    ("deepseek_v3", condense.DGA(selection="prompt", allow_future=True), "which latents .MLA. do not keep apart"),
    ("mistral-sliding", condense.CCA(), "has sliding windows in all layers"),
]
BAD_RUNS = [
    ({"data": ()}, "data: wanted at least one"), ({"phases": ()}, "phases: wanted at least one"),
    ({"data": "a.txt"}, "data must be a list or a tuple, got 'a.txt'"), ({"phases": None}, "phases must be a list"),
    ({"pretrained": "somewhere"}, "pretrained: wanted either"), ({"dtype": "int8"}, "dtype"), ({"seed": -1}, "seed"),
    ({"seed": 2**32}, "seed: wanted an integer below .*, got 4294967296"),
    ({"data_weights": (1.0, 2.0)}, "data_weights: wanted one for each of 1 data files, got 2"),
    ({"data_weights": (0.0,)}, "data_weights must be a finite number > 0, got 0.0"),
    ({"lora_rank": 4}, "lora_rank, lora_targets: wanted train='lora' for adapters, got train='all'"),
    ({"shard_size": "12 parts"}, "shard_size: wanted a size such as '12MB', got '12 parts'"),
    ({"shard_size": "0MB"}, "shard_size: wanted a size such as '12MB', got '0MB'"),
]  # fmt: skip
BAD_PHASES = [
    ({"warmup_steps": 2}, "warmup_steps: wanted at most steps, 1, got 2"),
    ({"steps": 0}, "steps"),
    ({"batch_size": 3, "gradient_accumulation_steps": 2}, "batch_size: wanted a multiple of"),
    ({"mix": "both"}, "mix"),
    ({"mix": "condensed"}, "method: wanted a method for mix 'condensed', got None"),
    (CONDENSED | {"method": condense.Dense(), "distill": 1.0}, "dense attention has nothing to learn of itself"),
    ({"distill": 1.0}, "distill: wanted below 1 with mix 'dense', as a model learns nothing of itself"),
    ({"task_share": 1.5}, "task_share must be a finite number from 0 to 1, got 1.5"),
    ({"keys": (4, 2)}, "keys: wanted the fewest and the most, got"),
    ({"keys": 3}, "keys must be a list or a tuple, got 3"),
    (CONDENSED | {"group_sizes": 4}, "group_sizes must be a list or a tuple"),
    (CONDENSED | {"method": "ccca"}, "method must be one of .*close: cca"),
    (CONDENSED | {"method": 3}, "method must be a condense method"),
    ({"keys": (1, 2.5)}, "keys must be an integer >= 1, got 2.5"),
    ({"learning_rate": 0.0}, "learning_rate must be a finite number > 0, got 0.0"),
    (CONDENSED | {"group_sizes": (8, 4)}, "group_sizes: wanted ascending sizes below the method's 16"),
    (CONDENSED | {"group_sizes": (0,)}, "group_sizes must be an integer >= 1"),
    (CONDENSED | {"group_sizes": (4,), "mix": "dense"}, "group_sizes: wanted a method with groups"),
    (CONDENSED | {"group_sizes": (4,), "method": condense.StreamingLLM()}, "group_sizes: wanted a method with"),
    (CONDENSED | {"max_grad_norm": 0}, "max_grad_norm must be a finite number > 0"),
    (CONDENSED | {"method": condense.Recall(prompt="exact")}, "train with prompt='recall'"),
    (CONDENSED | {"method": condense.CCA(window=128)}, "sequence_length: wanted at least 144 tokens, .* got 128"),
]
SAMPLES = [
    "The number of the quiet bridge is 4821.\n",
    "  two  spaces,\ttab, trailing \n\n\nthree newlines",
    "Ünïcödé “quotes” … 漢字 🎉 \u2028 \r\n end",
    "def f(x):\n    return x ** 2  # 10,000\n",
    " ",
    "",
]


@pytest.fixture
def config(text_file, tmp_path, tmp_path_factory):
    return RECIPES["smoke"]([text_file], tmp_path / "model", cache=tmp_path_factory.getbasetemp() / "cache")


def _one_phase(config, output, **changes):
    return dataclasses.replace(config, output=output, phases=(dataclasses.replace(config.phases[1], **changes),))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_equals_an_uninterrupted_one_and_logs_its_rate(config, tmp_path, dtype, monkeypatch, capsys):
    config = dataclasses.replace(config, dtype=dtype)
    whole = run_training(_one_phase(config, tmp_path / "whole"))
    seconds = itertools.count()
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    broken = _one_phase(config, tmp_path / "broken")  # 6 steps, an entry every 2, a checkpoint every 3
    with interrupted_at(4):
        run_training(broken)
    assert not broken.output.exists()
    run_training(broken, resume=True)
    phase, log = logged(broken.output)
    assert phase["resumed_from"] == "checkpoint-3"
    expected, resumed = load_file(whole / "model.safetensors"), load_file(broken.output / "model.safetensors")
    assert expected.keys() == resumed.keys()
    assert {weight.dtype for weight in expected.values()} == {getattr(torch, dtype)}
    assert all(torch.equal(weight, resumed[name]) for name, weight in expected.items())
    # resumed from the third step: the fourth, which was logged before, is logged once; each is of the steps before it
    assert [entry["step"] for entry in log] == [2, 3, 4, 6]
    losses = [[entry["loss"] for entry in each] for each in (logged(whole)[1], log)]
    assert losses[0] == losses[1]
    # the clock goes one second from entry to entry
    tokens = broken.phases[0].batch_size * broken.phases[0].sequence_length
    assert [entry["tokens_per_second"] for entry in log] == [2 * tokens, tokens, tokens, 2 * tokens]
    assert f"tokens_per_second {log[-1]['tokens_per_second']:.4g}" in capsys.readouterr().out


def test_the_tiny_mla_caches_latents(text_file, tmp_path):
    recipe = RECIPES["tiny_mla"]([text_file], tmp_path / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe.architecture))
    # a token is 128 + 32 channels of 2 bytes
    assert inspect(model, recipe.phases[-1].method, 2048)[0].dense_bytes == 2048 * 160 * 2


def test_the_recipe_of_the_bundled_model_is_the_one_that_made_it(tmp_path):
    report = Path(__file__).parents[2] / "benchmarks" / "results" / "demo-model-seed0-training.json"
    phases = json.loads(report.read_text(encoding="utf-8"))["results"]["phases"]
    config = RECIPES["demo_model"]([tmp_path / "text.jsonl"], tmp_path / "model", seed=0)
    # fields that are newer than the model have their defaults, with which training is as it was
    unset = plain(PhaseConfig("p", steps=1, sequence_length=128, batch_size=1))
    made = [unset | phase["phase"] for phase in phases]
    for phase in (x for x in made if x["method"] is not None):
        phase["method"] = condense.Method.parse(phase["method"]).to_dict()
    assert made == plain(config.phases)


def test_the_recipe_leaves_one_finished_folder(config):
    with interrupted_at(0, "mixed"):
        run_training(config)
    assert not config.output.exists()
    with sole_writer(config.output):
        refused(f"output: wanted one that no other run writes, got {config.output}", config, resume=True)
    output = run_training(config, resume=True)
    assert sorted(path.name for path in output.parent.iterdir()) == ["model"]
    assert not [path for path in output.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
    assert AutoModelForCausalLM.from_pretrained(output).config.use_cache
    assert AutoTokenizer.from_pretrained(output).padding_side == "left"
    document = json.loads((output / "training.json").read_text())
    assert document["provenance"]["seed"] == 0
    results = document["results"]
    assert results["data"] == ["text.txt"]
    assert [phase["tokens"] for phase in results["phases"]] == [6 * 4 * 256] * 2
    assert {"dense_loss", "condensed_loss", "grad_norm", "step"} <= results["phases"][1]["history"][0].keys()
    refused("output: wanted a path that does not exist yet", config)
    refused("resume: wanted an unfinished run in .*, got none, and .*model is there", config, resume=True)
    config.work.mkdir()
    refused("got a finished one, which only lacks the removal of .*: delete that folder", config, resume=True)


def test_dense_steps_are_dense_whatever_the_model_was_saved_with(text_file, tmp_path, monkeypatch):
    used, compute = [], MixedTrainer.compute_loss

    def record(self, model, *args, **kwargs):
        used.append((model.config._attn_implementation, condensed_layers(model)))
        return compute(self, model, *args, **kwargs)

    monkeypatch.setattr(MixedTrainer, "compute_loss", record)
    saved = condense.apply(tiny_llama(), condense.LCA(group_size=4, window=8), layers=[1])
    saved_with_tokenizer(saved, tmp_path / "saved")
    changes = {"mix": "alternate", "group_sizes": (), "gradient_checkpointing": True, "steps": 4}
    changes["gradient_accumulation_steps"] = 2
    adapted = adaptation(tmp_path, data=text_file, pretrained=tmp_path / "saved", **changes)
    run_training(adapted)
    condensed = "condense", dict.fromkeys(range(2), adapted.phases[0].method)
    assert used == 2 * ([("sdpa", {})] * 2 + [condensed] * 2)


def test_no_more_processes_build_sequences_than_there_are_cores(config, monkeypatch):
    trained = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(run, "train_phase", trained)
    with pytest.raises(KeyboardInterrupt):
        run_training(dataclasses.replace(config, workers=4))
    assert trained.call_args.kwargs["workers"] == 2


def test_another_run_is_not_resumed(config, text, tmp_path):
    config = dataclasses.replace(config.with_steps(2), data_weights=(1.0,))
    with interrupted_at(0, "mixed"):
        run_training(config)
    (data,) = config.data
    other, same = tmp_path / "other" / data.name, tmp_path / "same" / data.name
    for path, content in ((other, text.replace("27 boats", "28 boats")), (same, text)):
        path.parent.mkdir()
        path.write_text(content, encoding="utf-8")
    refused("resume: wanted True, .* delete that folder or choose another output", config)
    for changed, what in (
        (config.with_steps(5), "steps; resume with the same settings, delete that folder or"),
        (dataclasses.replace(config, seed=1), "seed"),
        (dataclasses.replace(config, data=(other,)), "data"),
        (dataclasses.replace(config, data_weights=()), "data_weights"),
    ):
        refused(f"got another {what}", changed, resume=True)
    record = config.work / "run.json"
    written = record.read_text()
    record.write_text(written[:40])
    refused(f"wanted the record of a run, got {record} without its end .*: delete", config, resume=True)
    record.write_text(written)
    run_training(dataclasses.replace(config, data=(same,)), resume=True)


def test_a_run_from_other_weights_of_the_same_name_is_not_resumed(text_file, tmp_path):
    for place, spread in (("one", 0.02), ("other", 0.03)):
        saved_with_tokenizer(tiny_llama(num_hidden_layers=1, initializer_range=spread), tmp_path / place / "base")

    def adapted(place):
        return adaptation(tmp_path, data=text_file, pretrained=tmp_path / place / "base", steps=2)

    with interrupted_at(1):
        run_training(adapted("one"))
    refused("got another pretrained", adapted("other"), resume=True)
    (tmp_path / "one").rename(tmp_path / "moved")
    run_training(adapted("moved"), resume=True)
    weights = tmp_path / "moved" / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    changed = adaptation(tmp_path, "cut", data=text_file, pretrained=weights.parent)
    refused("pretrained: wanted weights that can be read, got .*base: ", changed)
    assert not changed.work.exists()


def test_what_cannot_be_trained_leaves_nothing(text_file, tmp_path):
    sizes = {"vocab_size": 4096, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name, more, message in (
        ("gptj", {"rotary_dim": 4}, "cannot be condensed: its attention is written"),
        ("gpt2", {"n_positions": 64}, "64 learned positions"),
        ("llama", {"intermediate_size": 32}, "wanted more tokens"),
    ):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **more))
        saved_with_tokenizer(model, tmp_path / name)
        changes = {"sequence_length": 65536, "method": condense.CCA(), "pretrained": tmp_path / name}
        refused(message, adaptation(tmp_path, data=text_file, **changes))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2", "gptj", "llama"]


@pytest.mark.parametrize(("name", "method", "message"), UNTRAINED)
def test_a_method_that_cannot_be_trained_is_refused(name, method, message, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "prepare", lambda *_: pytest.fail("began to work"))
    tiny.config(name).save_pretrained(tmp_path / "base")
    refused(message, RECIPES["adapt"]([text_file], tmp_path / "adapted", pretrained=tmp_path / "base", method=method))
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_items_depend_on_seed_and_index_alone(tokenizer, corpus):
    builder = SequenceBuilder(tokenizer, corpus, load_words().trained, 256)
    phase = PhaseConfig(name="p", steps=5, sequence_length=256, batch_size=4, keys=(1, 3))
    first, again = (TrainingSequences([builder], phase, seed=(1, 0)) for _ in range(2))
    other = TrainingSequences([builder], phase, seed=(1, 1))
    assert len(first) == 20
    _ = again[7]
    weighted = 0
    for index in range(len(first)):
        item, same = first[index], again[index]
        assert all(torch.equal(x, same[name]) for name, x in item.items())
        answers = tokenizer.decode(item["input_ids"][item["loss_weights"] == 5.0])
        weighted += answers != ""
        assert answers.replace(" ", "").isdigit() or not answers
    assert 3 <= weighted <= 17
    assert not all(torch.equal(first[index]["input_ids"], other[index]["input_ids"]) for index in range(20))


def test_weights_decide_how_often_a_file_is_drawn_from(config, text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("zzz zzz.\n" * 500)
    files = dataclasses.replace(config, data=(text_file, other), data_weights=(3.0, 1.0))
    tokenizer, corpora = prepare(files)
    builders = [SequenceBuilder(tokenizer, corpus, load_words().trained, 256) for corpus in corpora]
    phase = PhaseConfig(name="p", steps=50, sequence_length=256, batch_size=8, keys=(1, 3))
    sequences = TrainingSequences(builders, phase, (0,), files.data_weights)
    texts = [tokenizer.decode(sequences[index]["input_ids"]) for index in range(400)]
    # the standard deviation of the share is 0.02
    assert sum("zzz" in text for text in texts) / 400 == pytest.approx(0.25, abs=0.08)
    assert len(prepare(dataclasses.replace(files, data_weights=()))[1]) == 1


def test_a_share_of_the_tasks_ends_early_with_fewer_numbers(tokenizer, corpus):
    builder = SequenceBuilder(tokenizer, corpus, load_words().trained, 2048)
    phase = PhaseConfig("p", 25, 2048, 8, keys=(16, 16), task_share=1.0, short_share=0.5)
    dataset = TrainingSequences([builder], phase, seed=(0,))
    ends, answers = [], []
    for index in range(len(dataset)):
        weighted = (dataset[index]["loss_weights"] == phase.answer_weight).nonzero().flatten()
        ends.append(int(weighted[-1]) + 3)  # the full stop and the newline follow
        answers.append(len(weighted))
    early = [size for size in ends if size < 2048]
    # the standard deviation of the share is 0.035; a third of the early ones ends before 512
    assert len(early) / len(ends) == pytest.approx(0.5, abs=0.14)
    assert sum(size <= 512 for size in early) / len(early) == pytest.approx(1 / 3, abs=0.2)
    assert all(size >= 256 for size in early)
    assert max(n for n, size in zip(answers, ends, strict=True) if size < 400) <= max(answers) / 4


def test_master_copies_keep_small_steps():
    model = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = MasterAdamW(model, lr=1e-4, weight_decay=0.0)
    for _ in range(50):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        optimizer.zero_grad()
    # A step of 1e-4 is lost on a bfloat16 weight of 1 (spacing 0.0039 below it); fifty of them are not.
    assert model.weight.float().allclose(torch.tensor(1 - 50e-4), atol=2e-3)
    assert (model.weight < 1).all()


def test_float32_is_plain_adamw():
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 4), torch.randn(8, 4)
    other = copy.deepcopy(model)
    ours = MasterAdamW(model, lr=1e-2, weight_decay=0.1)
    groups = [{"params": [other.weight]}, {"params": [other.bias], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        for trained, optimizer in ((model, ours), (other, plain)):
            optimizer.zero_grad()
            trained(x).square().sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    for step, name in ((9, COMPLETE), (10, COMPLETE), (20, "trainer_state.json")):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / name).write_text("{}")
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-9"]
    assert newest_checkpoint(tmp_path / "nothing") is None


@pytest.mark.parametrize(("changes", "message"), BAD_PHASES)
def test_bad_phases(changes, message):
    tiny.refused(message, dataclasses.replace, PhaseConfig("p", steps=1, sequence_length=128, batch_size=2), **changes)


@pytest.mark.parametrize(("changes", "message"), BAD_RUNS)
def test_bad_runs(config, changes, message):
    tiny.refused(message, dataclasses.replace, config, **changes)


def test_bad_data(config, tmp_path):
    missing, empty = tmp_path / "none.txt", tmp_path / "empty.txt"
    empty.write_text("")
    many, too_many = (_one_phase(config, config.output, keys=keys) for keys in ((300, 400), (1, 1201)))
    refused("data: wanted an existing text file, got .*none.txt", dataclasses.replace(config, data=(missing,)))
    refused(f"data: wanted texts in {empty}, got none", dataclasses.replace(config, data=(empty,)))
    refused(r"keys: wanted at most 1200, as .* of 2400 words, got \(1, 1201\)", too_many)
    refused(r"keys: wanted as many as fit into 256 tokens .*, some \d+, got \(300, 400\)", many)
    assert not config.work.exists()
    assert not config.output.exists()
    here = Path.cwd()
    assert dataclasses.replace(config, output=Path(".")).work == here.with_name(f"{here.name}.work")


@pytest.mark.parametrize("sample", SAMPLES)
def test_text_survives_the_tokenizer_that_is_trained(tokenizer, sample):
    assert tokenizer.decode(tokenizer.encode(sample, add_special_tokens=False)) == sample


def test_digits_and_newlines_are_tokens_of_their_own(tokenizer):
    texts = [tokenizer.decode([index]) for index in range(2, len(tokenizer))]
    assert all(text in ("\n", "0") or len(text) == 1 for text in texts if "\n" in text or any(map(str.isdigit, text)))
    assert [tokenizer.decode([index]) for index in tokenizer.encode("is 4821.")][-6:] == [" ", *"4821."]


def test_special_tokens_are_reloaded_and_need_room(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.padding_side == "left"
    assert again.bos_token_id == again.eos_token_id != again.pad_token_id
    batch = ["one", "one two\n12"]
    assert again(batch, padding=True)["input_ids"] == tokenizer(batch, padding=True)["input_ids"]
    assert again("one")["input_ids"][0] == again.bos_token_id
    tiny.refused("vocab_size: wanted at least 258 .*, got 257", train_tokenizer, ["text"], vocab_size=257)
