"""One run: train, evaluate, and the JSON that says how it went."""

from __future__ import annotations

import dataclasses
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from studies import ARCHITECTURES, Run
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
from condense.analysis import noise_effect
from condense.evaluate import passkey_sequences, retrieval, text_loss, text_sequences
from condense.results import write_results
from condense.tasks import SequenceBuilder, load_corpus, load_words
from condense.train import new_model
from condense.train.data import TrainingSequences
from condense.train.phase import train_phase

TOKENIZER = Path(condense.__file__).parent / "assets" / "demo"
KEYS = 8


@dataclass(frozen=True)
class Setting:
    """What all runs share.

    train, test: text files. work: folder of models, claims and results. sequences: held-out sequences per figure.
    workers: processes per run that build sequences. trial: so many steps of two sequences instead of what the study
    asks for, to try out a machine.
    """

    train: tuple[Path, ...]
    test: tuple[Path, ...]
    work: Path
    sequences: int = 60
    workers: int = 3
    trial: int | None = None

    def model_of(self, name: str) -> Path:
        """Where a run leaves its model."""
        return self.work / "models" / name

    def result_of(self, name: str) -> Path:
        """Where a run leaves its figures."""
        return self.work / "results" / f"{name}.json"


def load_tokenizer() -> PreTrainedTokenizerBase:
    """The bundled one."""
    return AutoTokenizer.from_pretrained(TOKENIZER)


def execute(run: Run, setting: Setting, *, keep_model: bool) -> None:
    """Train and evaluate; the result file appears last."""
    tokenizer, device = load_tokenizer(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    words, phase = load_words(), run.phase
    if setting.trial is not None:
        phase = dataclasses.replace(phase, steps=setting.trial, batch_size=2, warmup_steps=0)
    corpus = load_corpus(setting.train, tokenizer, setting.work / "cache")
    held_out = load_corpus(setting.test, tokenizer, setting.work / "cache")
    length = phase.sequence_length
    builder = SequenceBuilder(tokenizer, corpus, words.trained, length)
    testing = SequenceBuilder(tokenizer, held_out, words.held_out, length)

    set_seed(run.seed)
    if run.base is None:
        model = new_model(ARCHITECTURES[run.architecture], tokenizer, "bfloat16")
    else:
        model = AutoModelForCausalLM.from_pretrained(setting.model_of(run.base), dtype=torch.bfloat16)
    dataset = TrainingSequences(builder, phase, seed=(run.seed, int(run.base is not None)))
    curve = None if run.curve is None else _Curve(model, run, testing)
    folder = setting.work / "checkpoints" / run.name
    began = time.monotonic()
    trainer = train_phase(
        model, dataset, phase, folder, seed=run.seed, workers=setting.workers,
        callbacks=() if curve is None else (curve,),
    )  # fmt: skip
    seconds = time.monotonic() - began
    shutil.rmtree(folder, ignore_errors=True)
    if keep_model:
        target = setting.model_of(run.name)
        part = target.with_name(f".{target.name}.part")
        model.save_pretrained(part)
        shutil.rmtree(target, ignore_errors=True)  # left by a run that ended before it wrote its result
        part.rename(target)

    model.to(device).eval()
    content: dict[str, Any] = {"run": run, "parameters": model.num_parameters(), "seconds": round(seconds, 1)}
    content["history"] = [entry for entry in trainer.state.log_history if "loss" in entry]
    if curve is not None:
        content["curve"] = curve.points
    if run.methods:
        content |= _evaluate(model, run, testing, setting.sequences)
    if run.noise:
        content["noise"] = noise_effect(model, run.methods["own"], text_sequences(testing, 16, seed=3))
    write_results(setting.result_of(run.name), content, seed=run.seed)


def _evaluate(model: PreTrainedModel, run: Run, testing: SequenceBuilder, count: int) -> dict[str, Any]:
    length = run.phase.sequence_length
    edges = sorted({0, length // 2, *(edge for edge in (256, 512, 1024) if edge < length)})
    count = max(1, count * min(4096, length) // length)  # as many tokens of long texts as of 4,096
    content: dict[str, Any] = {
        "text": text_loss(model, run.methods, text_sequences(testing, count, seed=2), edges=edges)
    }
    if run.phase.task_share > 0:
        sequences = passkey_sequences(testing, count, keys=KEYS, form="question", seed=1)
        content["retrieval"] = retrieval(model, run.methods, sequences)
    return content


class _Curve(TrainerCallback):
    """Validation losses during training, with the attention that is trained."""

    def __init__(self, model: PreTrainedModel, run: Run, testing: SequenceBuilder) -> None:
        assert run.curve is not None
        self._model, self._methods, self._every = model, {"own": run.methods["own"]}, run.curve
        self._sequences = text_sequences(testing, 16, seed=4)
        self._edges = [0]
        self.points: list[dict[str, float]] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """One more point, every so many steps."""
        if state.global_step % self._every == 0:
            (result,) = text_loss(self._model, self._methods, self._sequences, edges=self._edges)
            self.points.append({"step": state.global_step, "loss": result.loss, "accuracy": result.accuracy})
            self._model.train()
