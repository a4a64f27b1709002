"""Two processes (gloo) against one: the same losses, for all weights in each (DDP) and spread weights (FSDP2)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import condense

SCRIPT = Path(__file__).with_name("processes.py")
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("processes")
    (path / "text.txt").write_text(text, encoding="utf-8")
    _, tokenizer = condense.demo_model()
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(path / "base")
    tokenizer.save_pretrained(path / "base")
    return path


def losses(folder, name, processes, train="all", killed_at=0, **environment):
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    paths = os.pathsep.join(filter(None, (str(Path(condense.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment}
    command = [sys.executable, *launch, str(SCRIPT), str(folder), name, train, str(killed_at)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[:6000]
    (phase,) = json.loads((folder / name / "training.json").read_text())["results"]["phases"]
    assert phase["resumed_from"] == (f"checkpoint-{killed_at // 2 * 2}" if killed_at else None)
    return [entry["loss"] for entry in phase["history"] if "loss" in entry]


def test_two_processes_have_the_losses_of_one(folder):
    one = losses(folder, "one", 1)
    two = losses(folder, "ddp", 2)
    print(one, two)
