"""One process of the adaptation: the base, or an arm."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from layer import KDA, library_version
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup, set_seed

import condense
from condense import CCA, Method
from condense.evaluate import passkey_sequences, text_sequences
from condense.evaluate.intervals import Proportion
from condense.evaluate.modes import in_eval_mode
from condense.models import use
from condense.results import write_results
from condense.tasks import SequenceBuilder, load_words
from condense.train import PhaseConfig
from condense.train.data import TrainingSequences
from condense.train.loss import token_loss
from condense.train.optimizer import MasterAdamW

sys.path.insert(0, str(Path(__file__).parent.parent / "zero_shot"))

from training import load_npz, train_dense  # of benchmarks/zero_shot

LENGTH, KEYS = 4096, 8
OWN = CCA(window=256, summary="streaming", key_pooling="select", rep_bias="log_size")


@dataclass(frozen=True)
class Arm:
    """What becomes of the base. attention: KDA in all layers but each ``dense_every``-th, or a method of ours."""

    title: str
    method: Method | None = None
    kda: bool = False
    dense_every: int | None = None


ARMS = {
    "dense": Arm("dense control, not distilled"),
    "cca": Arm("CCA, distilled, growing groups", OWN),
    "kda": Arm("KDA in all layers, distilled", kda=True),
    "kda-hybrid": Arm("KDA in three layers of four, distilled", kda=True, dense_every=4),
}


def phase_of(arm: Arm, steps: int, trial: bool) -> PhaseConfig:
    """16.4 million tokens for 500 steps; every arm reads the same ones."""
    phase = PhaseConfig(
        name="adapted", steps=steps, sequence_length=LENGTH, batch_size=8, learning_rate=1.5e-3,
        warmup_steps=steps // 16, task_share=0.8, keys=(4, 36), logging_steps=max(1, steps // 20),
        distill=1.0 if arm.kda or arm.method else 0.0,
    )  # fmt: skip
    if arm.method is not None:
        phase = replace(phase, mix="condensed", method=arm.method, group_sizes=(4, 8))
    return replace(phase, sequence_length=512, batch_size=2, keys=(2, 4)) if trial else phase


def train(model: Any, teacher: Any, phase: PhaseConfig, dataset: TrainingSequences, workers: int) -> list[Any]:
    """All weights in place, as `condense.train` does it; the log: loss and right answers of the last steps."""
    optimizer = MasterAdamW(model, lr=phase.learning_rate, weight_decay=phase.weight_decay)
    schedule = get_cosine_schedule_with_warmup(optimizer, phase.warmup_steps, phase.steps)
    log, total, began = [], torch.zeros(5, dtype=torch.float64, device=model.device), time.monotonic()
    model.train()
    pinned = model.device.type == "cuda"
    for step, batch in enumerate(DataLoader(dataset, phase.batch_size, num_workers=workers, pin_memory=pinned)):
        ids, weights = (batch[name].to(model.device, non_blocking=True) for name in ("input_ids", "loss_weights"))
        wanted = None
        if phase.distill:
            with torch.no_grad():
                wanted = teacher(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        method = phase.attention_at(step)
        with contextlib.nullcontext() if method is None else use(model, method):
            logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
            targets, by_token = ids.roll(-1, dims=1).flatten(), weights.roll(-1, dims=1).flatten()
            sums = token_loss(logits, targets, by_token, wanted, phase.distill)
            (sums.loss / sums.weights).backward()
        nn.utils.clip_grad_norm_(model.parameters(), phase.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += torch.stack(sums[1:]).double()
        if (step + 1) % phase.logging_steps == 0:
            ce, kl, weight, answers, right = total.tolist()
            entry = {"step": step + 1, "ce": ce / weight, "kl": kl / weight, "right": right / max(1, answers)}
            log.append(entry | {"seconds": round(time.monotonic() - began, 1)})
            print(log[-1], flush=True)
            total.zero_()
    model.eval()
    return log


@torch.no_grad()
def figures(model: Any, method: Method | None, held_out: SequenceBuilder, count: int) -> dict[str, Any]:
    """Hidden numbers found by greedy decoding, and the mean loss of other texts with its standard error."""
    questions = passkey_sequences(held_out, count, keys=KEYS, form="question", seed=1)
    texts, found, losses = text_sequences(held_out, count, seed=2), [], []
    with in_eval_mode(model), contextlib.nullcontext() if method is None else use(model, method):
        for sequence in questions:
            ids = torch.from_numpy(sequence.input_ids).to(model.device)
            right = model(input_ids=ids[None], use_cache=False).logits[0, :-1].argmax(-1) == ids[1:]
            found += [bool(right[start - 1 : stop - 1].all()) for start, stop in sequence.answers]
        for text in texts:
            ids = torch.from_numpy(text).to(model.device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            losses.append(F.cross_entropy(logits.float(), ids[1:]).double())
    loss = torch.stack(losses)
    return {
        "found": Proportion.of(found),
        "text_loss": float(loss.mean()),
        "standard_error": float(loss.std() / len(losses) ** 0.5),
    }


def base(options: argparse.Namespace) -> None:
    """Train the dense model that all arms start from, or take the bundled one; measure it, with CCA too."""
    began = time.monotonic()
    content: dict[str, Any] = {"model": "bundled"}
    if options.bundled:
        model: Any = condense.demo_model(torch.bfloat16)[0].cuda()
    else:
        corpus, logs = load_npz(options.train), options.work / "logs"
        model, phases = train_dense("llama", 0, tokenizer(), corpus, logs, trial=options.trial, longest=LENGTH)
        content = {"model": "trained", "seconds": round(time.monotonic() - began, 1), "phases": phases}
    model.save_pretrained(options.work / "base")
    held_out, count = _held_out(options), 2 if options.trial else options.sequences
    content["dense"], content["condensed"] = (figures(model, method, held_out, count) for method in (None, OWN))
    print(content["dense"], content["condensed"], sep="\n", flush=True)
    write_results(options.work / "base.json", content, seed=0)


def arm(options: argparse.Namespace) -> None:
    """Adapt the base in one way and measure it."""
    chosen = ARMS[options.arm]
    set_seed(0)
    teacher: Any = AutoModelForCausalLM.from_pretrained(options.work / "base", dtype=torch.bfloat16).cuda().eval()
    model = copy.deepcopy(teacher)
    replaced = [i for i in range(len(model.model.layers)) if not chosen.dense_every or (i + 1) % chosen.dense_every]
    for i in replaced if chosen.kda else ():
        model.model.layers[i].self_attn = KDA(model.model.layers[i].self_attn)
    held_out = _held_out(options)
    phase = phase_of(chosen, 2 if options.trial else options.steps, options.trial)
    builder = SequenceBuilder(tokenizer(), load_npz(options.train), load_words().trained, phase.sequence_length)
    count = 2 if options.trial else options.sequences
    content: dict[str, Any] = {
        "arm": options.arm, "title": chosen.title, "phase": phase, "kda_layers": replaced if chosen.kda else [],
        "parameters": sum(p.numel() for p in model.parameters()), "fla": library_version() if chosen.kda else None,
        "before": figures(model, chosen.method, held_out, count),
    }  # fmt: skip
    workers = 0 if options.trial else options.workers
    content["history"] = train(model, teacher, phase, TrainingSequences(builder, phase, seed=(0, 3)), workers)
    content["after"] = figures(model, chosen.method, held_out, count)
    print(content["before"], content["after"], sep="\n", flush=True)
    write_results(options.work / f"{options.arm}.json", content, seed=0)


def gather(options: argparse.Namespace) -> None:
    """One file of all arms."""
    read = {name: options.work / f"{name}.json" for name in ("base", *ARMS)}
    content = {name: json.loads(path.read_text())["results"] for name, path in read.items() if path.exists()}
    write_results(options.output, content, seed=0)


def _held_out(options: argparse.Namespace) -> SequenceBuilder:
    return SequenceBuilder(tokenizer(), load_npz(options.test), load_words().held_out, LENGTH)


def tokenizer() -> Any:
    """The bundled one."""
    return AutoTokenizer.from_pretrained(Path(condense.__file__).parent / "assets" / "demo")
