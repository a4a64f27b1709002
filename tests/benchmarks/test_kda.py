"""KDA as a baseline: the recurrence it is checked against, and that it is trained as everything else is."""

import copy
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from condense import CCA
from condense.train import PhaseConfig
from condense.train.phase import train_phase

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "kda"))

import adapt
import layer


class Fixed(Dataset):
    """Sequences of a seed, with weights."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(50, (64,), generator=generator), "loss_weights": torch.ones(64)}


def test_the_recurrence_is_the_papers_product_of_matrices():
    """State t is (I - beta k k^T) Diag(decay) times the one before, plus beta k v^T; an output is its query's row."""
    generator = torch.Generator().manual_seed(0)
    L, H, D = 7, 2, 4
    q, k, v, f = (torch.randn(1, L, H, D, dtype=torch.float64, generator=generator) for _ in range(4))
    b, a_log = torch.randn(1, L, H, dtype=torch.float64), torch.tensor([0.3, -0.5], dtype=torch.float64)
    bias = torch.randn(H * D, dtype=torch.float64, generator=generator)
    got = layer.recurrence(q, k, v, f, b, a_log, bias)
    for h in range(H):
        state, eye = torch.zeros(D, D, dtype=torch.float64), torch.eye(D, dtype=torch.float64)
        for t in range(L):
            query, key = (x[0, t, h] / (x[0, t, h].square().sum() + 1e-6).sqrt() for x in (q, k))
            decay = torch.diag((1 + (f[0, t, h] + bias.view(H, D)[h]).exp()) ** -a_log[h].exp())
            beta = 1 / (1 + (-b[0, t, h]).exp())
            state = (eye - beta * key.outer(key)) @ decay @ state + beta * key.outer(v[0, t, h])
            assert torch.allclose(got[0, t, h], query @ state / 2, rtol=1e-10, atol=1e-12)


def test_the_loop_trains_as_condense_train_does(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    phase = PhaseConfig(
        name="p", steps=6, sequence_length=64, batch_size=2, mix="condensed", method=CCA(group_size=8, window=16),
        group_sizes=(4,), distill=1.0, warmup_steps=2, logging_steps=3,
    )  # fmt: skip
    other = copy.deepcopy(model)
    log = adapt.train(model, copy.deepcopy(model).eval(), phase, Fixed(), workers=0)
    trainer = train_phase(other, Fixed(), phase, tmp_path, seed=0)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two.to(one.device), atol=1e-6), name
    theirs = [entry["condensed_kl"] for entry in trainer.state.log_history if "condensed_kl" in entry]
    assert [round(entry["kl"], 4) for entry in log] == theirs


def test_every_arm_reads_the_same_sequences():
    phases = [adapt.phase_of(arm, 100, False) for arm in adapt.ARMS.values()]
    same = ("steps", "sequence_length", "batch_size", "task_share", "keys", "answer_weight", "varied_share")
    assert len({tuple(getattr(phase, name) for name in same) for phase in phases}) == 1
