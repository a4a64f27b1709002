"""Short runs of `adapt`, what they logged, and training that stops in the middle, as if by Ctrl-C."""

import contextlib
import json

import pytest

import condense
from condense.train import RECIPES
from condense.train.trainer import MixedTrainer

METHOD = condense.CCA(group_size=16, window=16, summary="streaming")


def adaptation(folder, name="adapted", data="text.txt", **fields):
    """An adaptation of ``base`` in the folder, in float32, with an entry of the log for each step."""
    settings = {
        "steps": 6, "sequence_length": 128, "batch_size": 2, "keys": (1, 2), "checkpoint_steps": 2, "logging_steps": 1,
        "dtype": "float32", "workers": 0, "method": METHOD, "pretrained": folder / "base",
    }  # fmt: skip
    return RECIPES["adapt"]([folder / data], folder / name, **settings | fields)


def logged(output):
    """The only phase of a finished run, and the entries of its log that have a loss."""
    (phase,) = json.loads((output / "training.json").read_text())["results"]["phases"]
    return phase, [entry for entry in phase["history"] if "loss" in entry]


@contextlib.contextmanager
def interrupted_at(step):
    """Interrupts the block before this optimizer step, counted from 0; the block must not catch it."""
    stock = MixedTrainer.training_step

    def training_step(self, *args, **kwargs):
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return stock(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixedTrainer, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            yield
