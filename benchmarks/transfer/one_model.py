"""One model of the study: trained, then measured under every arm until its time is over."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exact
import torch
import weights
from choosers import Chooser, keep_latents
from contenders import arms, claims, costs
from evict import Eviction, evicting
from makes import STAGES, new_model, replaced, train
from reading import Reference, forced, generated, under
from texts import HeldOut, Texts, held_out, unpacked
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import condense
from condense import Method, Reread

LENGTHS = (16384, 32768, 4096, 8192)
# texts of prose, of code and with questions, by length
COUNTS = {4096: (16, 8, 24), 8192: (16, 8, 20), 16384: (12, 6, 20), 32768: (8, 4, 12)}
_EVICTING = 40  # seconds that evictions may take
_TINY: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 128}


def run(options: argparse.Namespace) -> None:
    """Train, or load what an earlier run has trained; then measure: the arms that decide at all lengths, evictions,
    the other arms, generation.
    """
    tokenizer = _tokenizer()
    path = options.out / f"{options.make}-s{options.seed}.jsonl"
    note = _noting(path, {"make": options.make, "seed": options.seed})
    model = _model(options)
    parameters = sum(p.numel() for p in model.parameters())
    note({"parameters": parameters, "config": model.config.to_diff_dict(), "torch": torch.__version__})

    def texts() -> Texts:
        return Texts(unpacked(options.corpus, "train-*.xz"), tokenizer, "trained")

    began, log = time.time(), _noting(options.out / f"{options.make}-s{options.seed}-training.jsonl", {})
    lengths, counts = ((1024, 512), {1024: (3, 1, 2), 512: (2, 1, 2)}) if options.tiny else (LENGTHS, COUNTS)
    name = f"{options.make}-s{options.seed}.weights"
    if options.weights is not None and (options.weights / name).exists():
        weights.load(model, options.weights / name)
        torch.set_float32_matmul_precision("high")
    else:
        train(
            model, texts, options.train_seconds, seed=options.seed, workers=options.workers, log=log,
            stages=((256, 0.5, 512), (512, 0.5, 512)) if options.tiny else STAGES,
        )  # fmt: skip
        if options.save_bits:
            weights.save(model, options.out / name, options.save_bits)
    note({"trained_seconds": time.time() - began})
    keep_latents(model)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    model = _in_bfloat16(model)
    prose = Texts(unpacked(options.corpus, "test-prose.xz"), tokenizer, "held_out")
    code = Texts(unpacked(options.corpus, "test-code.xz"), tokenizer, "held_out")
    place = _Place(model, options.make, options.until, note)
    held = {length: held_out(prose, code, length, counts[length]) for length in lengths}
    references = {length: Reference() for length in lengths}
    sizes = {length: arms(options.make, length, length == lengths[0]) for length in lengths}
    for number, length in enumerate(lengths):
        place.measure(length, sizes[length][0], held[length], references[length])
        if number == 0:
            place.diagnose(held[length])
    if time.time() + _EVICTING < options.until:
        place.evict(lengths[0], held[lengths[0]])
    for length in lengths:
        place.measure(length, sizes[length][1], held[length], references[length])
    place.generate(held[lengths[0]], lengths[0])
    note({"measured_seconds": time.time() - began})


class _Place:
    """A model, and where what is measured of it goes."""

    def __init__(self, model: PreTrainedModel, make: str, until: float, note: Callable[[dict[str, Any]], None]) -> None:
        self.model, self.make, self.until, self.note = model, make, until, note

    def measure(self, length: int, chosen: dict[str, Any], held: HeldOut, reference: Reference) -> None:
        """One record per arm; an arm that fails is recorded with its error, and none begins after the time is over."""
        for name, arm in chosen.items():
            if time.time() > self.until or (arm is not None and not reference.logits):
                return
            began, record = time.time(), {"length": length, "arm": name}
            try:
                record |= forced(self.model, arm, held, reference, fewer=isinstance(arm, Chooser))
            except Exception:
                record["error"] = traceback.format_exc()[-3000:]
            try:
                record |= costs(self.model, name, arm, length)
            except Exception:
                record["costs_error"] = traceback.format_exc()[-1000:]
            self.note(record | {"settings": str(arm), "seconds": round(time.time() - began, 2)})

    def diagnose(self, held: HeldOut) -> None:
        """Per layer, what open groups and entries do to the output of attention, on two texts of prose."""
        for index, text in enumerate(held.prose[:2]):
            layers: list[dict[str, Any]] = []
            try:
                with replaced(exact.diagnosis(min(128, len(text.ids) // 128), layers)), torch.no_grad():
                    self.model(input_ids=torch.from_numpy(text.ids)[None].to(self.model.device), use_cache=False)
                self.note({"diagnosis": index, "layers": layers})
            except Exception:
                self.note({"diagnosis": index, "error": traceback.format_exc()[-3000:]})

    def evict(self, length: int, held: HeldOut) -> None:
        """Reread, SnapKV and KVzip at two sizes, on half of the texts."""
        kinds = (("snapkv", False), ("kvzip", True))
        rereads = {f"reread {share:.0%}": Reread(share=share) for share in (0.1, 0.25)}
        masks = {f"{name} {share:.0%}": Eviction(share, again) for name, again in kinds for share in (0.1, 0.25)}
        for ways in (rereads, masks):  # apart, as masks cannot be made for every make
            began = time.time()
            try:
                for name, record in evicting(self.model, ways, held, max(2, len(held.asked) // 2)).items():
                    place = {"length": length, "arm": name, "device": ways[name].share, "read": ways[name].share}
                    self.note(place | record | {"seconds": round(time.time() - began, 2)})
            except Exception:
                self.note({"length": length, "arm": ", ".join(ways), "error": traceback.format_exc()[-3000:]})

    def generate(self, held: HeldOut, length: int) -> None:
        """The claimed settings through caches, for the time that is left."""
        generated(self.model, claims(), held, lambda record: self.note(record | {"length": length}), self.until)


def warm(options: argparse.Namespace) -> None:
    """Run a part of the arms once with random weights, so that their kernels are compiled when they are needed."""
    index, of = map(int, options.part.split("/"))
    model = _in_bfloat16(_model(options, num_hidden_layers=2))
    keep_latents(model)
    lengths = (512,) if options.tiny else LENGTHS
    tasks = [
        (length, name, arm)
        for length in lengths
        for group in arms(options.make, length, length == lengths[0])
        for name, arm in group.items()
    ]
    tasks = [task for task in tasks if isinstance(task[2], Method | Chooser)][index::of]
    for length, name, arm in tasks:
        try:
            with under(model, arm), torch.no_grad():
                model(input_ids=torch.randint(4096, (1, length), device=model.device), use_cache=False)
        except Exception as error:
            print(f"{name} at {length}: {error}", flush=True)
    # the decode steps of the claimed settings, with other numbers than those that are measured
    for _, method in list(claims().items())[1:][index::of]:
        with under(model, method), torch.no_grad():
            ids = torch.randint(4096, (1, lengths[0]), device=model.device)
            model.generate(input_ids=ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)


def _model(options: argparse.Namespace, **changes: Any) -> PreTrainedModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    changes = (_TINY if options.tiny else {}) | changes
    if "num_hidden_layers" in changes and options.make.startswith("gemma3"):
        changes["layer_types"] = ["sliding_attention", "full_attention"]
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
