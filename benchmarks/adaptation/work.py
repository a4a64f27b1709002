"""One process of the study: encode text, train a base, or train and measure an arm."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import ARMS, LENGTH, MEASURED, arm_phase, base_phase
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed

import condense
from condense.evaluate import passkey_sequences, retrieval, text_loss, text_sequences
from condense.results import write_results
from condense.tasks import Corpus, SequenceBuilder, encode_corpus, load_words, read_documents
from condense.train import RECIPES, new_model
from condense.train.data import TrainingSequences
from condense.train.phase import train_phase
from condense.train.recipes import DEMO_ARCHITECTURE
from condense.train.trained import set_trained

WORKERS = 3
LORA_RANK = 64


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
    np.savez_compressed(options.output, **vars(corpus))


def base(options: argparse.Namespace) -> None:
    """Train the seed's dense model."""
    seed, tokenizer = int(options.seeds), _tokenizer()
    set_seed(seed)
    model = new_model(DEMO_ARCHITECTURE, tokenizer, "bfloat16")
    phase = base_phase(options.base_steps)
    builder = SequenceBuilder(tokenizer, _corpus(options.train), load_words().trained, phase.sequence_length)
    folder = options.work / f"base-s{seed}"
    dataset = TrainingSequences(builder, phase, seed=(seed, 0))
    train_phase(model, dataset, phase, folder / "log", seed=seed, workers=WORKERS)
    model.save_pretrained(folder)


def arm(options: argparse.Namespace) -> None:
    """Adapt the seed's dense model in one way and measure it."""
    seed, name, tokenizer, words = int(options.seeds), options.arms, _tokenizer(), load_words()
    start, phase = options.work / f"base-s{seed}", arm_phase(name, options.steps)
    set_seed(seed)
    stock = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)
    settings = RECIPES["adapt"]([start], start, pretrained=start, method="cca", train=ARMS[name].train,
                                lora_rank=LORA_RANK)  # fmt: skip
    model = set_trained(stock, settings)
    builder = SequenceBuilder(tokenizer, _corpus(options.train), words.trained, LENGTH)
    dataset = TrainingSequences(builder, phase, seed=(seed, 1))
    began = time.monotonic()
    trainer = train_phase(model, dataset, phase, options.work / f"{name}-s{seed}", seed=seed, workers=WORKERS)
    seconds = time.monotonic() - began
    held_out = SequenceBuilder(tokenizer, _corpus(options.test), words.held_out, LENGTH)
    measured: Any = model.eval()
    questions = passkey_sequences(held_out, options.sequences, keys=8, form="question", seed=1)
    texts = text_sequences(held_out, options.sequences, seed=2)
    content = {
        "arm": name,
        "seed": seed,
        "phase": phase,
        "base_steps": options.base_steps,
        "parameters": stock.num_parameters(),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "seconds": round(seconds, 1),
        "history": [entry for entry in trainer.state.log_history if "loss" in entry],
        "retrieval": retrieval(measured, MEASURED, questions),
        "text": text_loss(measured, MEASURED, texts, edges=(0, LENGTH // 4, LENGTH // 2)),
    }
    write_results(options.work / "results" / f"{name}-s{seed}.json", content, seed=seed)


def _corpus(path: Path) -> Corpus:
    with np.load(path) as arrays:
        return Corpus(arrays["tokens"], arrays["line_starts"], arrays["document_starts"])


def _tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(Path(condense.__file__).parent / "assets" / "demo")
