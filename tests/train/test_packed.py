"""Packed documents in training: how sequences are built, and that each document's loss is what it is alone."""

import contextlib
import copy
import itertools
import json
from functools import partial

import pytest
import torch
from models import small, tiny
from models.test_families import EXACT, STATED
from small_models import tiny_llama
from train.runs import adaptation, logged, refused
from transformers import AutoModelForCausalLM

import condense
from condense.models import use
from condense.tasks import SequenceBuilder, encode_corpus, load_words
from condense.train import PhaseConfig, run_training
from condense.train.data import TrainingSequences, mixes_documents
from condense.train.loss import token_loss
from condense.train.phase import train_phase

METHOD = condense.CCA(group_size=4, window=8, summary="streaming")
BY_LAYER = {1: METHOD}
LENGTH = 640
DOCUMENTS = [f"Story {n}.\n" + f"Line {n} of a story, and what it tells.\n" * (1 + n % 7) for n in range(300)]
SHORT = {"data": "text.jsonl", "steps": 4, "sequence_length": LENGTH, "batch_size": 4, "packed": True}
adapted = partial(adaptation, method=METHOD, **SHORT)
# among them llama4_text, some of whose layers get no positions, and opt, whose mask is made without positions
SOME = (
    "llama", "gemma2", "deepseek_v3", "gpt2", "lfm2", "qwen3_next", "bamba", "minimax", "gpt_oss", "llama4_text", "opt",
)  # fmt: skip
REST = [name for name in small.TYPES if STATED.get(name) == EXACT and name not in SOME]


@pytest.fixture(scope="module")
def builder(tokenizer):
    return SequenceBuilder(tokenizer, encode_corpus(DOCUMENTS, tokenizer), load_words().trained, LENGTH)


def phase(**fields):
    settings = {"steps": 4, "sequence_length": LENGTH, "batch_size": 2, "keys": (1, 3), "short_share": 0.8}
    return PhaseConfig(**{"name": "p", "packed": True, "logging_steps": 1, **settings, **fields})


def starts(item):
    return (item["position_ids"] == 0).nonzero().flatten().tolist()


def test_plain_sequences_are_whole_documents_between_parts_of_two(tokenizer, builder):
    dataset = TrainingSequences([builder], phase(task_share=0.0), seed=(0,))
    for index in range(len(dataset)):
        item = dataset[index]
        begun = starts(item)
        assert len(begun) > 3
        pieces = [item["input_ids"][a:b] for a, b in itertools.pairwise([*begun, LENGTH])]
        assert all(ids[0] == tokenizer.bos_token_id for ids in pieces)
        assert all(ids[-1] == tokenizer.eos_token_id for ids in pieces[:-1])
        assert {tokenizer.decode(ids, skip_special_tokens=True) for ids in pieces[1:-1]} <= set(DOCUMENTS)
        positions = torch.cat([torch.arange(len(ids)) for ids in pieces])
        assert torch.equal(item["position_ids"], positions)
        assert torch.equal(item["loss_weights"], (positions > 0).float())
    assert TrainingSequences([builder], phase(packed=False), seed=(0,))[0].keys() == {"input_ids", "loss_weights"}


def test_hidden_numbers_and_questions_are_one_document(tokenizer, builder):
    dataset = TrainingSequences([builder, builder], phase(task_share=1.0, steps=10), (0,), [1.0, 2.0])
    early = 0
    for index in range(len(dataset)):
        item = dataset[index]
        begun = starts(item)
        end = [*begun, LENGTH][1]
        assert (item["loss_weights"] > 1).nonzero()[-1] < end
        assert begun == [0] or tokenizer.decode(item["input_ids"][end - 1]) == "\n"
        early += len(begun) > 1
        assert item["loss_weights"][begun].sum() == 0
    assert 8 <= early <= 20


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_llama(vocab_size=len(tokenizer), initializer_range=0.2)


def alone(model, method, item):
    total = 0.0
    for a, b in itertools.pairwise([*starts(item), LENGTH]):
        ids, weights = item["input_ids"][a:b], item["loss_weights"][a:b]
        with torch.no_grad(), use(model, method) if method else contextlib.nullcontext():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        total += token_loss(logits[:-1], ids[1:], weights[1:]).loss.item()
    return total


@pytest.mark.parametrize("method", [METHOD, condense.Recall(group_size=4, window=8, num_recall=2), BY_LAYER, None])
def test_the_loss_is_the_mean_over_documents_each_alone(model, builder, tmp_path, method):
    made = phase(method=method, mix="condensed" if method else "dense", task_share=0.5, learning_rate=1e-9)
    dataset = TrainingSequences([builder], made, seed=(0,))
    trainer = train_phase(copy.deepcopy(model), dataset, made, tmp_path, seed=0)
    items = [dataset[0], dataset[1]]
    assert min(len(starts(item)) for item in items) > 1
    batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
    weight = batch["loss_weights"].sum()
    trainer.state.global_step = 0
    other = {**batch, "position_ids": torch.arange(LENGTH).expand(2, -1)}
    with torch.no_grad(), use(model, method) if method else contextlib.nullcontext():
        packed, mixed = (trainer.compute_loss(model, x, num_items_in_batch=weight).item() for x in (batch, other))
    exact = sum(alone(copy.deepcopy(model).double(), method, item) for item in items) / weight.item()
    plain = sum(alone(model, method, item) for item in items) / weight.item()
    # packed sums add the same terms up in another order
    assert abs(packed - exact) <= 2 * abs(plain - exact) + 2**-23 * abs(exact)
    assert abs(mixed - exact) > 1e-3


@pytest.fixture
def base(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("train", ["all", "lora"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_teacher_reads_the_same_documents_and_teaches_nothing_at_first(base, train):
    config = adapted(base, mix="alternate", gradient_accumulation_steps=2, gradient_checkpointing=True, train=train)
    run_training(config)
    _, entries = logged(config.output)
    # the first step is dense and its weights are the teacher's
    assert entries[0]["dense_kl"] == entries[0]["loss"] == 0
    assert all(entry[f"{kind}_kl"] >= 0 for entry, kind in zip(entries, ["dense", "condensed"] * 2, strict=True))
    assert entries[1]["condensed_kl"] > 0
    assert {"loss", "grad_norm", "condensed_loss"} <= entries[1].keys()
    assert AutoModelForCausalLM.from_pretrained(config.output).config.condense


def leaks(model, method):
    """True if a token sees anything of the document before its own in the row."""
    first, second = 9, 11
    ids = tiny.tokens(1, first + second) % small.VOCAB
    positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
    with torch.no_grad(), use(model, method) if method else contextlib.nullcontext():
        row = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, first:]
        own = model(input_ids=ids[:, first:], position_ids=positions[:, first:], use_cache=False).logits
    # float64 but for parts that models compute in float32
    return ((row - own).abs().max() > 5e-6 * own.std()).item()


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_models_that_mix_documents_are_known(name):
    model = small.model(name)
    mixes = mixes_documents(model.config) is not None
    assert mixes == bool(leaks(model, None))
    assert mixes or not leaks(model, METHOD)


def test_a_model_that_mixes_documents_is_refused_before_any_work(base):
    for name, why in (("lfm2", "layers that are not attention"), ("opt", "dense attention reads across documents")):
        small.model(name).save_pretrained(base / "base")
        refused(f"packed: wanted a model that keeps documents apart, got {name}.*{why}", adapted(base))
        assert not adapted(base).work.exists()
