"""One model of the study: trained, then measured under every arm until its time is over."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import weights
from adapted import OPENED, ByLayer, adapt, by_clock, forms_of
from calibrated import calibrated
from contenders import CACHE, Arm, arms_of, costs
from makes import batches, longest, new_model, stages_of, train
from reading import Reference, forced, logits_of
from texts import HeldOut, Texts, held_out, unpacked
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import condense
from condense import Dense
from condense.calibration import default_candidates

LENGTHS = (16384, 32768, 4096, 65536)
# texts of prose, of code and with questions, by length
COUNTS = {4096: (32, 16, 48), 16384: (32, 16, 64), 32768: (24, 12, 64), 65536: (12, 6, 32)}
_RATE = 5e-4  # of learning, where a model is adapted
_TINY: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 96, "intermediate_size": 128}


def run(options: argparse.Namespace) -> None:
    """Train, or load what an earlier run has trained; then measure: at all lengths what decides, then other arms."""
    if not options.tiny and not torch.cuda.is_available():
        raise ValueError(f"--make {options.make}: wanted a GPU that is there, got none")
    tokenizer = _tokenizer()
    path = options.out / f"{options.make}-s{options.seed}.jsonl"
    note = _noting(path, {"make": options.make, "seed": options.seed})
    model = _model(options)
    parameters = sum(p.numel() for p in model.parameters())
    note({"parameters": parameters, "config": model.config.to_diff_dict(), "torch": torch.__version__})

    began, log = time.time(), _noting(options.out / f"{options.make}-s{options.seed}-training.jsonl", {})
    lengths: tuple[int, ...] = (1024, 512) if options.tiny else LENGTHS[:2] if options.adapt else _lengths(options.make)
    counts = {1024: (3, 1, 2), 512: (2, 1, 2)} if options.tiny else COUNTS
    name = f"{options.make}-s{options.seed}.weights"
    torch.set_float32_matmul_precision("high")
    if options.weights is not None and any(options.weights.glob(f"{name}.*")):
        weights.load(model, options.weights / name)
    else:
        text = Texts(unpacked(options.corpus, "train-*.xz"), tokenizer, "trained")
        train(
            model, text, options.train_seconds, seed=options.seed, workers=options.workers, log=log,
            stages=((256, 0.5, 512), (512, 0.5, 512)) if options.tiny else stages_of(options.make),
        )  # fmt: skip
        if options.save_bits:
            weights.save(model, options.out / name, options.save_bits)
    note({"trained_seconds": time.time() - began})
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    prose = Texts(unpacked(options.corpus, "test-prose.xz"), tokenizer, "held_out")
    code = Texts(unpacked(options.corpus, "test-code.xz"), tokenizer, "held_out")
    held = {length: held_out(prose, code, length, counts[length]) for length in lengths}
    references = {length: Reference() for length in lengths}
    if options.adapt:
        _adapt(options, model, held, references, note)
    else:
        place = _Place(_in_bfloat16(model), options.until, note)
        sizes = {length: arms_of(options.study, length) for length in lengths}
        if getattr(model.config, "kv_lora_rank", None):
            for group in (group for groups in sizes.values() for group in groups):
                group.pop("cache of 4 bits", None)  # a cache of latents has no heads to round
        if options.study == "calibrated":
            lengths = tuple(sorted(lengths, reverse=True))
            found = _calibrated(options, place.model, lengths[0], note)
            sizes = {length: (first | found, {}) for length, (first, _) in sizes.items()}
        for length in lengths:
            place.measure(length, sizes[length][0], held[length], references[length])
        for name in dict.fromkeys(name for _, others in sizes.values() for name in others):
            for length in lengths:
                arm = {name: sizes[length][1][name]} if name in sizes[length][1] else {}
                place.measure(length, arm, held[length], references[length])
    note({"measured_seconds": time.time() - began})


def _calibrated(
    options: argparse.Namespace, model: PreTrainedModel, length: int, note: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Allocations for a model, by name; what was measured for them lies beside its weights."""
    text = Texts(unpacked(options.corpus, "train-1.xz"), _tokenizer(), "trained")
    measured = (options.weights or options.out) / f"{options.make}-s{options.seed}-measured"
    numbers = 4 if options.tiny else 16
    found = calibrated(
        model, _tokenizer(), text, length, numbers=numbers, measured=measured, wanted=options.form or None
    )
    note({"calibrated": {name: str(arm) for name, arm in found.items()}})
    return found


def _adapt(
    options: argparse.Namespace, model: PreTrainedModel, held: dict[int, HeldOut], references: dict[int, Reference],
    note: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Measure the model as it is, then adapted to each form, from the same weights, for ``options.adapt`` seconds.

    Steps of one text of the greatest length alternate with steps of as many tokens in texts of the others. The forms
    of the study of allocations are those that `condense calibrate` finds.
    """
    text = Texts(unpacked(options.corpus, "train-*.xz"), _tokenizer(), "trained")
    most, seed = max(held), options.seed
    before = _in_bfloat16(copy.deepcopy(model))
    untouched: dict[str, Arm] = {"dense": None}
    if options.study == "calibrated":
        forms: dict[str, ByLayer] = _calibrated(options, before, most, note)
        untouched |= forms
    else:
        forms = forms_of(int(model.config.num_hidden_layers))
        untouched |= {"recall-device": OPENED, "cache of 4 bits": CACHE}
        untouched |= {f"{name}, not adapted": form for name, form in forms.items()}
    for length in held:
        _Place(before, options.until, note).measure(length, untouched, held[length], references[length])
    del before
    for name, rate in itertools.product(options.form or forms, options.rate or [_RATE]):
        if time.time() + options.adapt > options.until:
            return
        form, name = forms[name], f"{name}, rate {rate:g}"
        log = _noting(options.out / f"{options.make}-s{seed}-adapting.jsonl", {"form": name})
        adapted = copy.deepcopy(model)
        workers = options.workers // len(held)
        of_lengths = (batches(text, length, most, seed=seed + 1, workers=workers) for length in sorted(held)[::-1])
        data = itertools.chain.from_iterable(zip(*of_lengths, strict=False))
        adapt(adapted, form, data, by_clock(options.adapt), log, rate)
        adapted = _in_bfloat16(adapted)
        for arm in ({f"{name}, adapted": form}, {f"{name}, adapted, run densely": {"rest": Dense()}}):
            for length in sorted(held, reverse=True):
                _Place(adapted, options.until, note).measure(length, arm, held[length], references[length])


class _Place:
    """A model, and where what is measured of it goes."""

    def __init__(self, model: PreTrainedModel, until: float, note: Callable[[dict[str, Any]], None]) -> None:
        self.model, self.until, self.note = model, until, note

    def measure(self, length: int, chosen: dict[str, Any], held: HeldOut, reference: Reference) -> None:
        """One record per arm; an arm that fails is recorded with its error, and none begins after the time is over."""
        for name, arm in chosen.items():
            if time.time() > self.until or (arm is not None and not reference.logits):
                return
            began, record = time.time(), {"length": length, "arm": name}
            try:
                record |= forced(self.model, arm, held, reference)
            except Exception:
                record["error"] = traceback.format_exc()[-3000:]
            try:
                record |= costs(self.model, arm, length)
            except Exception:
                record["costs_error"] = traceback.format_exc()[-1000:]
            self.note(record | {"settings": str(arm), "seconds": round(time.time() - began, 2)})


def warm(options: argparse.Namespace) -> None:
    """Run a part of the arms once with random weights, so that their kernels are compiled when they are needed."""
    index, of = map(int, options.part.split("/"))
    if options.adapt:
        _warm_adapting(options, index, of)
        return
    model = _in_bfloat16(_model(options, num_hidden_layers=2))
    sizes = ((length, arms_of(options.study, length)) for length in _lengths(options.make))
    tasks = [(length, *arm) for length, groups in sizes for group in groups for arm in group.items()]
    for length, name, arm in tasks[index::of]:
        try:
            logits_of(model, arm, torch.randint(4096, (length,), device=model.device), length // 2)
        except Exception as error:
            print(f"{name} at {length}: {error}", flush=True)


def _warm_adapting(options: argparse.Namespace, index: int, of: int) -> None:
    """Train and measure forms with random weights, two steps of each size of groups."""
    candidates = default_candidates(LENGTHS[1], latents="mla" in options.make, host_memory=False)
    mixed: dict[str, ByLayer] = {"mixed": dict(enumerate(candidates))}
    forms = mixed if options.study == "calibrated" else forms_of(4)
    for form in list(forms.values())[index::of]:
        model = _model(options, num_hidden_layers=4)
        ids = torch.randint(4096, (1, LENGTHS[1]))
        batch = ids, torch.ones_like(ids, dtype=torch.float32)
        adapt(model, form, [batch] * 6, lambda step: step / 6, print, _RATE)
        logits_of(_in_bfloat16(model), form, ids[0].to(model.device), LENGTHS[1] // 2)


def _lengths(make: str) -> tuple[int, ...]:
    return tuple(length for length in LENGTHS if length <= longest(make))


def _model(options: argparse.Namespace, **changes: Any) -> PreTrainedModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    changes = (_TINY if options.tiny else {}) | changes
    if "num_hidden_layers" in changes and options.make.startswith(("gemma3", "cohere2")):
        changes["layer_types"] = ["sliding_attention", "full_attention"] * (changes["num_hidden_layers"] // 2)
    return new_model(options.make, options.seed, **changes).to(device)


def _in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its weights, not the frequencies of its positions, in bfloat16, in evaluation mode."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval()


def _tokenizer() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        Path(condense.__file__).parent / "assets" / "demo"
    )
    tokenizer.model_max_length = 10**9
    return tokenizer


def _noting(path: Path, fixed: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Appends records to a file of JSON lines, each at once."""

    def note(record: dict[str, Any]) -> None:
        line = json.dumps(fixed | {"time": round(time.time(), 1)} | record, default=str)
        with path.open("a") as file:
            file.write(line + "\n")
        if "length" in record:
            print({name: record[name] for name in record if not isinstance(record[name], list)}, flush=True)

    return note
