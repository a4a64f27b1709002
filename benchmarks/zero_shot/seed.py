"""One process of the study: the model of a seed, and what is measured on it."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from continued import LAST, FewerBits, measure
from heads import by_head
from rows import LATENT, POOLED, SHARES, TRAINED, biases, calibrations, latents, methods, nearest, opened
from training import adapt, device, load_npz, train_dense
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import condense
from condense import Method, SnapKV
from condense.calibration.samples import draw_samples
from condense.evaluate import passkey_sequences, retrieval, text_loss, text_sequences
from condense.methods.grouped import GroupPooling
from condense.models import described
from condense.models.inspect import inspect
from condense.results import write_results
from condense.tasks import PasskeySequence, SequenceBuilder, load_words

KEYS = 16


def run_seed(options: argparse.Namespace) -> None:
    """Train, then measure every part at every length; each result is a file of its own."""
    seed, name = int(options.seeds), f"{options.architecture}-s{options.seeds}"
    tokenizer = AutoTokenizer.from_pretrained(Path(condense.__file__).parent / "assets" / "demo")
    model = _model(options, seed, tokenizer, options.work / "models" / name)
    for length, part in (wanted.split(":") for wanted in options.measure.split(",")):
        path = options.work / "results" / f"{name}-{length}-{part}.json"
        if path.exists():
            continue
        began, at = time.monotonic(), Place(options, tokenizer, seed, int(length))
        content = {"architecture": options.architecture, "seed": seed, "length": at.length, "part": part}
        content |= _PARTS[part](model, at)
        write_results(path, content | {"seconds": round(time.monotonic() - began, 1)}, seed=seed)
        print(f"{path.stem}: {time.monotonic() - began:.0f} s", flush=True)


class Place(NamedTuple):
    """What every measurement of a seed at a length needs."""

    options: argparse.Namespace
    tokenizer: PreTrainedTokenizerBase
    seed: int
    length: int

    def calibration_texts(self) -> list[str]:
        """Documents."""
        corpus = load_npz(self.options.calibration)
        ends = [*corpus.document_starts[1:], len(corpus.tokens)]
        spans = zip(corpus.document_starts, ends, strict=True)
        return [self.tokenizer.decode(corpus.tokens[start : end - 1]) for start, end in spans]

    @property
    def pooled(self) -> GroupPooling:
        """How the model's layers are pooled without training."""
        return LATENT if self.options.architecture == "mla" else POOLED

    @property
    def trained(self) -> GroupPooling:
        """How they are pooled after it."""
        return LATENT if self.options.architecture == "mla" else TRAINED

    def configs(self, pooled: GroupPooling) -> Mapping[str, list[condense.CalibrationConfig]]:
        """See `rows.calibrations`."""
        return calibrations(self.length, max(2, self.options.texts // 2), self.seed, pooled)

    def held_out(self) -> tuple[list[np.ndarray], list[PasskeySequence]]:
        """Test texts, and four times as many with hidden numbers: asked for by a question in the first half of them, by
        a line to complete in the other.
        """
        testing = SequenceBuilder(self.tokenizer, load_npz(self.options.test), load_words().held_out, self.length)
        count = 1 if self.options.trial else self.options.texts * max(1, 8192 // self.length)
        forms = (("question", 1), ("cloze", 3))
        questions = [passkey_sequences(testing, 2 * count, keys=KEYS, form=form, seed=seed) for form, seed in forms]
        return text_sequences(testing, count, seed=2), [sequence for of in questions for sequence in of]


def _model(options: argparse.Namespace, seed: int, tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedModel:
    if not folder.is_dir():
        began = time.monotonic()
        corpus = load_npz(options.train)
        trained, records = train_dense(
            options.architecture, seed, tokenizer, corpus, options.work / "logs" / folder.name, trial=options.trial
        )
        content = {"architecture": options.architecture, "seed": seed, "part": "training", "phases": records}
        seconds = round(time.monotonic() - began, 1)
        print(f"{folder.name}: trained in {seconds} s", flush=True)
        write_results(
            options.work / "results" / f"{folder.name}-training.json",
            content | {"seconds": seconds},
            seed=seed,
            overwrite=True,
        )
        trained.save_pretrained(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device()).eval()
    return model


def _methods(model: PreTrainedModel, at: Place) -> dict[str, Any]:
    """Every method in all layers; but on latents those that change a cache after the prompt too."""
    choices = methods(at.length, at.pooled)
    read = _read(model, at, choices)
    if at.pooled is LATENT:
        return read
    width, shares = inspect(model, choices["dense"], at.length)[0].width, read["shares"]
    ways = {
        f"snapkv {share:.0%}": SnapKV(budget=round(share * at.length) - LAST)
        for share in SHARES
        if share * at.length > 1.5 * LAST
    }
    bits = {f"dense cache of {n} bits": FewerBits(n) for n in (8, 4)}
    shares |= {name: ((way.budget + LAST) / at.length, 0.0) for name, way in ways.items()}
    shares |= {name: (way.share(at.length, width), 0.0) for name, way in bits.items()}
    texts, questions = at.held_out()
    asked = max(1, len(texts) // 4)
    return read | {"continued": measure(model, {"dense": None, **ways, **bits}, texts, questions, asked)}


def _calibrated(model: PreTrainedModel, at: Place) -> dict[str, Any]:
    """Dense attention, and every calibrated allocation."""
    allocations, goals = _calibrate(model, at, at.pooled, "zero-shot")
    return _read(model, at, {"dense": condense.Dense(), **allocations}) | {"goals": goals}


def _nearest(model: PreTrainedModel, at: Place) -> dict[str, Any]:
    """Recall in all layers, as it comes nearest to the goals."""
    return _read(model, at, nearest(at.length))


def _opened(model: PreTrainedModel, at: Place) -> dict[str, Any]:
    """Recall with more and more open groups."""
    return _read(model, at, opened(at.length))


def _latents(model: PreTrainedModel, at: Place) -> dict[str, Any]:
    """Recall on latents by open groups, index and bits."""
    return _read(model, at, latents(at.length))


def _read(model: PreTrainedModel, at: Place, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, bytes and what is lost, by label."""
    texts, questions = at.held_out()
    return {
        "choices": {name: described(choice) for name, choice in choices.items()},
        "shares": {name: _share(model, choice, at.length) for name, choice in choices.items()},
        "text": text_loss(model, choices, texts, edges=(0, at.length // 2, at.length - LAST)),
        "retrieval": retrieval(model, choices, questions),
    }


def _calibrate(
    model: PreTrainedModel, at: Place, pooled: GroupPooling, name: str
) -> tuple[dict[str, dict[int, Method]], dict[str, Any]]:
    """By label, the allocations that met their goals; by place, the losses of layers and how each goal was met."""
    texts, folder = at.calibration_texts(), at.options.work / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    allocations, records = {}, {}
    for place, configs in at.configs(pooled).items():
        kept = folder / f"measured-{at.options.architecture}-s{at.seed}-{at.length}-{name}-{place}.json"
        record: dict[str, Any] = {}
        for config in configs:
            goal = f"{config.budget_nats} nats" if config.cache is None else f"{config.cache:.1%}"
            try:
                result = condense.calibrate(model, at.tokenizer, texts, config, measured=kept)
            except ValueError as error:
                record[goal] = str(error)
                continue
            allocations[f"calibrated, {place}, {goal}"] = result.allocation
            record[goal] = {"measured": result.chosen.quality(), "held_out": result.verified.quality()}
            record["layers"] = [vars(loss) | {"method": described(loss.method)} for loss in result.layers]
        records[place] = record
    return allocations, records


def _share(model: PreTrainedModel, choice: Any, length: int) -> tuple[float, float]:
    """Bytes on the device and in host memory, as shares of the dense cache's."""
    rows = inspect(model, choice, length)
    dense = sum(row.dense_bytes for row in rows)
    return sum(row.bytes for row in rows) / dense, sum(row.host_bytes for row in rows) / dense


def _heads(model: PreTrainedModel, at: Place) -> dict[str, Any]:
    config = at.configs(at.pooled)["host"][0]
    return by_head(model, draw_samples(at.tokenizer, at.calibration_texts(), config), config)


def _adapted(model: PreTrainedModel, at: Place) -> dict[str, Any]:
    """As the other parts, after a short distilled adaptation of all weights."""
    student, history = _student(model, at, at.trained, "adapted")
    allocations, goals = _calibrate(student, at, at.trained, "adapted")
    before = _read(model, at, {"dense": condense.Dense()})
    others = methods(at.length, at.trained) | nearest(at.length)
    after = _read(student, at, {**others, **allocations})
    return after | {"history": history, "goals": goals, "before": before}


def _biases(model: PreTrainedModel, at: Place) -> dict[str, Any]:
    """Dense attention, and the model after the same adaptation with each bias, pooled and dense."""
    content = _read(model, at, {"dense": condense.Dense()})
    for name, method in biases(at.trained).items():
        student, _ = _student(model, at, method, name.replace(" ", "-"))
        read = _read(student, at, {name: method, f"{name}, then dense": condense.Dense()})
        for key in ("text", "retrieval"):
            content[key] += read[key]
        for key in ("choices", "shares"):
            content[key] |= read[key]
    return content


def _student(
    model: PreTrainedModel, at: Place, method: GroupPooling, name: str
) -> tuple[PreTrainedModel, list[dict[str, Any]]]:
    """A copy of the model after a short distilled adaptation of all weights to a method, and the log of it."""
    student = copy.deepcopy(model).train()
    folder = at.options.work / "logs" / f"{name}-{at.options.architecture}-s{at.seed}-{at.length}"
    corpus = load_npz(at.options.train)
    history = adapt(student, at.seed, at.tokenizer, corpus, method, at.length, folder, trial=at.options.trial)
    return student.eval(), history


_PARTS: Mapping[str, Callable[[PreTrainedModel, Place], dict[str, Any]]] = {
    "calibrated": _calibrated,
    "methods": _methods,
    "nearest": _nearest,
    "opened": _opened,
    "latents": _latents,
    "heads": _heads,
    "adapted": _adapted,
    "biases": _biases,
}
