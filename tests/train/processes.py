"""Started by `test_processes.py`, in one process or two: adaptations by name, each in its own way."""

import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from train.runs import adaptation, interrupted_at

import condense
from condense.train import run_training

METHOD = condense.CCA(group_size=8, window=16, summary="streaming")


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


def main(folder, *runs):
    """``NAME:TRAIN:HOW`` of each run in the folder of base and text; names in fsdp... by FSDP2.

    HOW: "whole"; "begun": killed in its fourth step, after the checkpoint of two; "resumed": one that was begun;
    "killed": begun and resumed.
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
        distill=0.5, packed=True, method=METHOD,
    )  # fmt: skip
    if how in ("begun", "killed"):
        with interrupted_at(3):
            run_training(config)
    if how != "begun":
        run_training(config, resume=how != "whole")
