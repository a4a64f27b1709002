"""Results of a calibration: the loss of each layer, the curve of quality against cache, and the allocation."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch

from condense.calibration.config import CalibrationConfig
from condense.calibration.measure import Measured
from condense.files import whole_file
from condense.methods import LMInfinite, Method, StreamingLLM, settings_of
from condense.results import plain, provenance
from condense.tasks import LEAST_FOUND
from condense.version import __version__


class Mean(NamedTuple):
    """A mean over texts and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The mean of one value per text, of two texts at least."""
        return cls(float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values)))

    def __str__(self) -> str:
        form = ".4f" if self.mean == 0 or abs(self.mean) >= 0.001 else ".1e"
        return f"{self.mean:{form}}±{self.error:{form}}"


@dataclass(frozen=True)
class LayerLoss:
    """One layer under one candidate, all others stock: mean divergence from the dense predictions, in nats per token.

    kl: on plain text. answers_kl: on the answers to hidden numbers. found: as in `CurvePoint`. Both None without them.
    """

    layer: int
    method: Method
    kl: Mean
    answers_kl: Mean | None
    found: tuple[int, int, int] | None = None

    @property
    def total(self) -> float:
        """The loss by which candidates are compared: the sum of both divergences."""
        return self.kl.mean + (0.0 if self.answers_kl is None else self.answers_kl.mean)


@dataclass(frozen=True)
class CurvePoint:
    """One allocation, layer to method.

    cache, host: bytes on the device and in host memory as shares of a dense cache's, by arithmetic. kl: mean divergence
    from the dense predictions. nats: mean loss above the dense model's. found: how many hidden numbers this allocation
    finds, how many the dense model finds, and how many there are; None without any.
    """

    methods: Mapping[int, Method]
    cache: float
    host: float
    kl: Mean
    nats: Mean
    found: tuple[int, int, int] | None

    def within(self, config: CalibrationConfig) -> bool:
        """True without a budget; else if the point keeps to it and finds enough of the hidden numbers."""
        return config.budget_nats is None or (self.kl.mean <= config.budget_nats and self.finds_enough(config))

    def finds_enough(self, config: CalibrationConfig) -> bool:
        """True if enough of the hidden numbers are found, or there are none."""
        return self.found is None or self.found[0] >= config.min_found * self.found[1]

    def quality(self) -> str:
        """The point's loss and the numbers that it finds, in words."""
        found = "" if self.found is None else f", finds {self.found[0]} of {self.found[2]} (dense {self.found[1]})"
        return f"loses {self.kl} nats{found}"


def found_of(readings: Sequence[Measured], dense: Sequence[Measured]) -> tuple[int, int, int] | None:
    """Hidden numbers counted: found under an allocation, found by dense attention, and all; None if there are none."""
    total = sum(len(reading.right) for reading in dense)
    return (sum(sum(x.right) for x in readings), sum(sum(x.right) for x in dense), total) if total > 0 else None


@dataclass(frozen=True)
class Calibration:
    """The result of `condense.calibrate`.

    layers: every layer under every candidate alone. uniform: every candidate in all layers. curve: allocations from the
    largest cache to the smallest. chosen: the allocation that meets the goals, on the measured texts; verified: the
    same allocation on held-out texts. steps_back: how many allocations failed before it, on measured or held-out texts.
    """

    config: CalibrationConfig
    layers: tuple[LayerLoss, ...]
    uniform: tuple[CurvePoint, ...]
    chosen: CurvePoint
    verified: CurvePoint
    curve: tuple[CurvePoint, ...]
    steps_back: int

    @property
    def finds_enough(self) -> bool:
        """False if too few of the hidden numbers are found, as may happen if the size of the cache is the only goal."""
        return self.chosen.finds_enough(self.config) and self.verified.finds_enough(self.config)

    @property
    def doubts(self) -> list[str]:
        """Reasons not to trust the allocation, in words: goals that are not met, and texts that do not show enough."""
        config, said = self.config, []
        if not self.finds_enough:
            both = " and ".join("{} of {}".format(*x.found) for x in (self.chosen, self.verified) if x.found)
            said.append(
                f"fewer than {config.min_found:.0%} of the numbers that dense attention finds: {both} on measured and "
                "held-out text. Ask for more cache, or name candidates with more open groups"
            )
        if self.chosen.found is not None and self.chosen.found[1] < LEAST_FOUND * self.chosen.found[2]:
            _, found, hidden = self.chosen.found
            said.append(
                f"dense attention itself finds only {found} of {hidden} hidden numbers, so they show little: calibrate "
                "at a shorter length, or trust the plain text alone"
            )
        for method, point in zip(config.candidates, self.uniform, strict=True):
            is_near = isinstance(method, StreamingLLM | LMInfinite)
            if is_near and config.budget_nats is not None and point.within(config):
                said.append(
                    f"{method} in all layers is within the budget too, and sees no far text: these texts do not need "
                    "it, or the model does not use it. If yours do, give longer or other texts, or hide numbers"
                )
        return said

    @property
    def allocation(self) -> dict[int, Method]:
        """Layer to method, for `condense.apply`."""
        return dict(self.chosen.methods)

    def save(self, path: str | Path, *, device: torch.device | None = None, overwrite: bool = False) -> Path:
        """Write the allocation as JSON, with all that it rests on; ``condense.apply(model, "@PATH")`` reads it.

        The file appears complete or not at all. device: where it was measured, for the record.
        Raises FileExistsError if there is a file and overwrite is False.
        """
        document = settings_of(self.allocation) | {
            "version": __version__,
            "calibration": {
                "provenance": provenance(self.config.seed, device),
                "config": plain(asdict(self.config) | {"candidates": self.config.candidates}),
                "layers": [plain(vars(loss)) for loss in self.layers],
                **{name: [_record(point) for point in getattr(self, name)] for name in ("uniform", "curve")},
                "chosen": _record(self.chosen),
                "verified": _record(self.verified),
                "steps_back": self.steps_back,
            },
        }
        target = Path(path)
        with whole_file(target, overwrite=overwrite) as file:
            file.write((json.dumps(document, indent=2, allow_nan=False) + "\n").encode())
        return target


def _record(point: CurvePoint) -> dict[str, object]:
    return plain(vars(point) | settings_of(point.methods))
