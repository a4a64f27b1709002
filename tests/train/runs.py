"""Short runs of `adapt`, what they logged, and training that stops as if by Ctrl-C; in one process or two."""

import contextlib
import dataclasses
import json
import os

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState

import condense
from condense.train import RECIPES, run_training
from condense.train.trainer import MixedTrainer

METHOD = condense.CCA(group_size=16, window=16, summary="streaming")
PACKED_METHOD = METHOD.replace(group_size=8)


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


def refused(message, config, **options):
    with pytest.raises(ValueError, match=message):
        run_training(config, **options)


@contextlib.contextmanager
def interrupted_at(step, phase=None):
    """Interrupts the block before this optimizer step (of a phase), counted from 0; the block must not catch it."""
    stock = MixedTrainer.training_step

    def training_step(self, *args, **kwargs):
        if self.state.global_step == step and phase in (None, self._phase.name):
            raise KeyboardInterrupt
        return stock(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixedTrainer, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            yield


def take_gloo_for_fsdp():
    """Accelerate spreads weights over accelerators only; PyTorch does over processes on a CPU too."""
    stock = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init
    gathered = Accelerator.get_state_dict
    # On a GPU the copy to the host waits until the weights are gathered. On a CPU there is no copy: adding 0 waits.
    Accelerator.get_state_dict = lambda *args, **kwargs: {k: v + 0 for k, v in gathered(*args, **kwargs).items()}


def run_all(folder, *runs):
    """``NAME:TRAIN:HOW`` of each run in the folder of base and text; names in fsdp... by FSDP2. HOW: "whole"; "begun":
    killed in its fourth step, after the checkpoint of two; "resumed": one that was begun; "killed": begun and resumed;
    "refused": with a batch that does not divide among two.
    """
    torch.set_num_threads(1)
    take_gloo_for_fsdp()
    for run in runs:
        name, train, how = run.split(":")
        os.environ["ACCELERATE_USE_FSDP"] = str(name.startswith("fsdp")).lower()
        adapt(folder, name, train, how)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def adapt(folder, name, train, how):
    config = adaptation(
        folder, name, "text.jsonl", train=train, steps=4, batch_size=4, learning_rate=1e-3, gradient_checkpointing=True,
        distill=0.5, packed=True, method=PACKED_METHOD,
    )  # fmt: skip
    if how == "refused":
        odd = dataclasses.replace(config.phases[0], batch_size=3)
        refused("batch_size: wanted", dataclasses.replace(config, phases=(odd,)))
        return
    if how in ("begun", "killed"):
        with interrupted_at(3):
            run_training(config)
    if how != "begun":
        run_training(config, resume=how != "whole")
