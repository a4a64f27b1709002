"""Distances of a model's predictions under an allocation from its dense ones, text by text, measured once and kept.

Shapes: n tokens whose predictions are compared, V vocabulary.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from condense.calibration.samples import Sample, Samples
from condense.files import whole_file
from condense.methods import Method
from condense.models import use
from condense.models.choice import described
from condense.results import fingerprint, plain
from condense.version import __version__

_SLICE = 1024  # rows of logits that are converted to float32 at a time

# layer index -> number of a candidate; layers that are left out stay stock
Allocation = Mapping[int, int]


class Measured(NamedTuple):
    """One text under one allocation. kl: mean KL divergence from the dense predictions, in nats. nats: mean loss on the
    text's own tokens above the dense model's. right: for each hidden number, whether it was found.
    """

    kl: float
    nats: float
    right: tuple[bool, ...]


class MeasuredFile(dict[str, Measured]):
    """Readings by text and allocation (`_key`), kept in a file that is whole at any time, or in memory only."""

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        """path: a file with this fingerprint is continued. Raises ValueError for any other file, and for a folder."""
        self._path, self._fingerprint = path, fingerprint
        if path is None or not path.exists():
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            held = {key: Measured(kl, nats, tuple(right)) for key, (kl, nats, right) in content["readings"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"measured: wanted a file of earlier measurements, got {path}: {error}; remove it, or name another file"
            ) from error
        if content.get("fingerprint") != fingerprint:
            raise ValueError(
                f"measured: {path} holds measurements of another model, text, length, seed or other candidates: remove "
                "it, or name another file"
            )
        self.update(held)

    def __setitem__(self, key: str, reading: Measured) -> None:
        super().__setitem__(key, reading)
        if self._path is not None:
            with whole_file(self._path, overwrite=True) as file:
                file.write(json.dumps({"fingerprint": self._fingerprint, "readings": self}).encode())


def _key(sample: int, allocation: Allocation) -> str:
    return f"{sample} " + ",".join(f"{layer}:{number}" for layer, number in sorted(allocation.items()))


class Meter:
    """Reads texts with a model under allocations.

    A text is read in one forward, as a candidate's steps would read it (`Method.as_steps`).

    model: with stock attention, in evaluation mode; left as it was. measured, held_out: numbers of the texts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        candidates: Sequence[Method],
        samples: Samples,
        path: Path | None = None,
        on_forward: Callable[[], None] = lambda: None,
    ) -> None:
        """path: where readings are kept, see `MeasuredFile`. on_forward: called after each forward."""
        self._model, self._candidates, self._on_forward = model, candidates, on_forward
        self._samples = [*samples.measured, *samples.held_out]
        self.measured = range(len(samples.measured))
        self.held_out = range(len(samples.measured), len(self._samples))
        self._store = MeasuredFile(path, _conditions(model, candidates, self._samples))

    def missing(self, sample: int, allocations: Sequence[Allocation]) -> int:
        """Number of forwards that `read` would take."""
        missing = [allocation for allocation in allocations if self._store.get(_key(sample, allocation)) is None]
        return bool(missing) + sum(map(bool, missing))

    @torch.no_grad()
    def read(self, sample: int, allocations: Sequence[Allocation]) -> list[Measured]:
        """One reading of a text per allocation, measured now unless it was kept.

        Raises ValueError for predictions that are not finite, because their loss cannot be compared.
        """
        dense: Tensor | None = None
        readings = []
        for allocation in allocations:
            reading = self._store.get(_key(sample, allocation))
            if reading is None:
                if dense is None:
                    dense = self._logits(sample, {})
                    self._on_forward()
                logits = self._logits(sample, allocation) if allocation else dense
                reading = _compared(dense, logits, self._samples[sample])
                if not (math.isfinite(reading.kl) and math.isfinite(reading.nats)):
                    methods = {layer: self._candidates[number] for layer, number in allocation.items()}
                    raise ValueError(
                        f"the model's predictions must be finite to be compared, got a divergence of {reading.kl} nats "
                        f"with {described(methods) if methods else 'dense attention'}: use another dtype, or leave "
                        "the candidate out"
                    )
                self._store[_key(sample, allocation)] = reading
                if allocation:
                    self._on_forward()
            readings.append(reading)
        return readings

    def _logits(self, sample: int, allocation: Allocation) -> Tensor:
        """Logits ``[n, V]`` by which the compared tokens are predicted."""
        ids, compared = self._samples[sample].ids.to(self._model.device), self._samples[sample].compared
        methods = {layer: self._candidates[number].as_steps for layer, number in allocation.items()}
        first = int(compared[0])
        kept = len(ids) - first + 1  # logits at position i predict token i + 1
        with use(self._model, methods) if methods else nullcontext():
            logits = self._model(input_ids=ids[None], use_cache=False, logits_to_keep=kept).logits
        return logits[0][(compared - first).to(logits.device)]


def _compared(dense: Tensor, logits: Tensor, sample: Sample) -> Measured:
    """Compare the predictions of a text's compared tokens with dense ones; dense, logits ``[n, V]``."""
    targets = sample.ids[sample.compared].to(logits.device)
    wide = torch.promote_types(logits.dtype, torch.float32)
    kl, nats = [], []
    for p, q, target in zip(dense.split(_SLICE), logits.split(_SLICE), targets.split(_SLICE), strict=True):
        log_p, log_q = p.to(wide).log_softmax(-1), q.to(wide).log_softmax(-1)
        kl.append((log_p.exp() * (log_p - log_q)).sum(-1))
        nats.append((log_p - log_q).gather(-1, target[:, None])[:, 0])
    right = (logits.argmax(-1) == targets).tolist()
    found = tuple(all(right[start:stop]) for start, stop in sample.answers)
    return Measured(float(torch.cat(kl).double().mean()), float(torch.cat(nats).double().mean()), found)


def _conditions(model: PreTrainedModel, candidates: Sequence[Method], samples: Sequence[Sample]) -> str:
    """A hash of what readings depend on: weights, configuration, candidates, texts, this library."""
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    digest = hashlib.sha256()
    settings = {"version": __version__, "config": config, "candidates": plain(list(candidates))}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode() + fingerprint(model).encode())
    for sample in samples:
        digest.update(sample.ids.numpy().tobytes() + sample.compared.numpy().tobytes())
    return digest.hexdigest()
