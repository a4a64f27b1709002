"""LoRA with distillation in Llama-3.1-8B's shape, random weights: memory and tokens per second, dense beside it."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

from condense import CCA
from condense.results import write_results
from condense.train import RECIPES, PhaseConfig
from condense.train.phase import train_phase
from condense.train.trained import set_trained

STEPS = 3  # the first warms up
METHOD = CCA(group_size=16, window=1024, summary="streaming", rep_bias="log_size")
RUNS = {
    "condensed, distilled": {"mix": "condensed", "distill": 1.0},
    "condensed": {"mix": "condensed"},
    "dense": {"mix": "dense"},
}


class Noise(Dataset[dict[str, torch.Tensor]]):
    """Random tokens; what is computed does not depend on them."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self._length, self._vocabulary = length, vocabulary

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(self._vocabulary, (self._length,), generator=generator)
        return {"input_ids": ids, "loss_weights": (torch.arange(self._length) > 0).float()}


def measure(layers: int, length: int, output: Path) -> None:
    """Train a few steps in each way on one GPU and write what they took."""
    settings = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    run = RECIPES["adapt"]([output], output, pretrained="", method=METHOD, train="lora", lora_rank=16)
    rows = []
    for name, fields in RUNS.items():
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = set_trained(AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16), run)
        phase = PhaseConfig(
            name=name, steps=STEPS, sequence_length=length, batch_size=1, method=METHOD, learning_rate=1e-4,
            warmup_steps=0, gradient_checkpointing=True, checkpoint_steps=10**6, logging_steps=1, **fields,
        )  # fmt: skip
        torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as folder:
            dataset = Noise(length, settings.vocab_size)
            trainer = train_phase(model, dataset, phase, Path(folder), seed=0)  # type: ignore[arg-type]
        steps = [entry["tokens_per_second"] for entry in trainer.state.log_history if "loss" in entry]
        peak = torch.cuda.max_memory_allocated() / 2**30
        rows.append({"name": name, "tokens_per_second": steps, "peak_gib": round(peak, 2)})
        print(rows[-1], flush=True)
        del model, trainer
        gc.collect()
        torch.cuda.empty_cache()
        content = {"layers": layers, "length": length, "method": METHOD, "lora_rank": 16, "rows": rows}
        write_results(output, content, seed=0, overwrite=True)
