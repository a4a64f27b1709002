"""One process of the study: encode text, train a base, or train and measure an arm."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import ARMS, BASES, EDGES, LENGTH, Arm, arm_phase, base_phases
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

import condense
from condense import Dense, Method
from condense.evaluate import passkey_sequences, retrieval, text_loss, text_sequences
from condense.results import write_results
from condense.tasks import Corpus, SequenceBuilder, encode_corpus, load_words, read_documents
from condense.train import RECIPES, new_model
from condense.train.data import TrainingSequences
from condense.train.phase import train_phase
from condense.train.trained import set_trained

WORKERS = 3
LEARNED = 0.97  # share of the answers' tokens that are right, at which the base's short phase may end
KEYS = 8  # questions per text


def encode(options: argparse.Namespace) -> None:
    """Write the tokens of the beginning of each file."""

    def beginning(path: Path) -> Iterator[str]:
        left = options.characters
        for document in read_documents([path]):
            if left <= 0:
                return
            yield document
            left -= len(document)

    corpus = encode_corpus([document for path in options.data for document in beginning(path)], _tokenizer())
    np.savez(options.output, **vars(corpus))


def base(options: argparse.Namespace) -> None:
    """Train a dense model of the seed."""
    seed, name, tokenizer = int(options.seeds), options.arms, _tokenizer()
    folder = options.work / f"{name}-s{seed}"
    set_seed(seed)
    model = new_model(BASES[name], tokenizer, "bfloat16")
    corpus, words = _corpus(options.train), load_words().trained
    history = []
    for index, phase in enumerate(base_phases(options.base_steps)):
        dataset = TrainingSequences(
            SequenceBuilder(tokenizer, corpus, words, phase.sequence_length), phase, seed=(seed, index)
        )
        ends = [_UntilLearned(phase.steps // 2)] if index == 0 else []
        trainer = train_phase(
            model, dataset, phase, folder / phase.name, seed=seed, workers=2 * WORKERS, callbacks=ends
        )
        history.append({"phase": phase, "history": _losses(trainer.state)})
    model.save_pretrained(folder)
    write_results(
        options.work / "bases" / f"{name}-s{seed}.json", {"base": name, "seed": seed, "phases": history}, seed=seed
    )


def arm(options: argparse.Namespace) -> None:
    """Adapt the seed's dense model in one way and measure it."""
    seed, name, words = int(options.seeds), options.arms, load_words()
    chosen, phase = ARMS[name], arm_phase(name, options.steps)
    start = options.work / f"{chosen.base}-s{seed}"
    set_seed(seed)
    stock = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)
    stock.to("cuda" if torch.cuda.is_available() else "cpu")
    held_out = SequenceBuilder(_tokenizer(), _corpus(options.test), words.held_out, LENGTH)
    content: dict[str, Any] = {
        "arm": name, "seed": seed, "phase": phase, "train": chosen.train, "parameters": stock.num_parameters(),
        "trained": 0, "seconds": 0.0, "history": [], "curve": [],
    }  # fmt: skip
    measured: Any = stock
    if chosen.train != "none":
        measured = _trained(stock, chosen, start)
        curve = _Curve(measured, Dense() if phase.mix == "dense" else chosen.method, held_out, options.steps // 20)
        builder = SequenceBuilder(_tokenizer(), _corpus(options.train), words.trained, LENGTH)
        dataset = TrainingSequences(builder, phase, seed=(seed, 10))
        began = time.monotonic()
        folder = options.work / f"{name}-s{seed}"
        trainer = train_phase(measured, dataset, phase, folder, seed=seed, workers=WORKERS, callbacks=[curve])
        content |= {
            "trained": sum(p.numel() for p in measured.parameters() if p.requires_grad),
            "seconds": round(time.monotonic() - began, 1),
            "history": _losses(trainer.state),
            "curve": curve.entries,
        }
    questions = passkey_sequences(held_out, options.sequences, keys=KEYS, form="question", seed=1)
    texts = text_sequences(held_out, options.sequences, seed=2)
    content |= {"retrieval": [], "text": []}
    for methods in chosen.measured():
        content["retrieval"] += retrieval(measured, methods, questions)
        content["text"] += text_loss(measured, methods, texts, edges=EDGES)
        write_results(options.work / "results" / f"{name}-s{seed}.json", content, seed=seed, overwrite=True)


class _UntilLearned(TrainerCallback):
    """Ends a phase at the first log entry from step ``least`` on at which nearly all answers are right."""

    def __init__(self, least: int) -> None:
        self._least = least

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step >= self._least and (logs or {}).get("dense_answer_accuracy", 0) >= LEARNED:
            control.should_training_stop = True


class _Curve(TrainerCallback):
    """Measures the model on a few held-out texts every few steps, with the method that it is adapted to."""

    def __init__(self, model: nn.Module, method: Method, held_out: SequenceBuilder, every: int) -> None:
        self.entries: list[dict[str, float]] = []
        self._model: Any = model
        self._methods, self._every = {"own": method}, every
        self._questions = passkey_sequences(held_out, 8, keys=24, form="question", seed=3)
        self._texts = text_sequences(held_out, 8, seed=4)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self._every:
            return
        (asked,) = retrieval(self._model, self._methods, self._questions)
        (read,) = text_loss(self._model, self._methods, self._texts, edges=(0,))
        self.entries.append({"step": state.global_step, "found": asked.exact.share, "text_loss": round(read.loss, 4)})


def _trained(stock: PreTrainedModel, arm: Arm, start: Path) -> nn.Module:
    """The model with the weights marked that the arm trains."""
    run = RECIPES["adapt"]([start], start, pretrained=start, method=arm.method)
    fields: dict[str, Any] = {"train": arm.train, "lora_rank": arm.lora_rank}
    return set_trained(stock, dataclasses.replace(run, **fields))


def _losses(state: TrainerState) -> list[dict[str, Any]]:
    return [entry for entry in state.log_history if "loss" in entry]


def _corpus(path: Path) -> Corpus:
    with np.load(path) as arrays:
        return Corpus(arrays["tokens"], arrays["line_starts"], arrays["document_starts"])


def _tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(Path(condense.__file__).parent / "assets" / "demo")
