"""Programs that need packages of their own: TRL's trainer, and `transformers serve`."""

import json
import socket
import time
import urllib.error
import urllib.request

import pytest
import torch
from small_models import saved_with_tokenizer, tiny_llama
from transformers import AutoModelForCausalLM

import condense
from condense.demo import demo_text
from condense.models import condensed_layers

METHOD = condense.CCA(group_size=4, window=8)


@pytest.fixture
def saved(tmp_path):
    return saved_with_tokenizer(condense.apply(tiny_llama(), METHOD), tmp_path / "tiny")


@pytest.mark.parametrize("packing", [False, True])
def test_trl_trains_a_condensed_model(saved, tmp_path, packing):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    texts = Dataset.from_list([{"text": f"The number of the quiet bridge is {n}. " * 6} for n in range(12)])
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    settings = SFTConfig(
        str(tmp_path / "out"), max_steps=6, per_device_train_batch_size=2, learning_rate=3e-3, logging_steps=1,
        max_length=96, packing=packing, padding_free=False, report_to=[], use_cpu=True, save_strategy="no",
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model, args=settings, train_dataset=texts, processing_class=AutoTokenizer.from_pretrained(saved)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert condensed_layers(trainer.model) == {0: METHOD, 1: METHOD}
    trainer.save_model(tmp_path / "trained")
    assert condensed_layers(AutoModelForCausalLM.from_pretrained(tmp_path / "trained")) == {0: METHOD, 1: METHOD}


def _wait_for(address):
    """Until a server answers, at most 30 s."""
    for attempt in range(300):
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except urllib.error.URLError:
            if attempt == 299:
                raise
            time.sleep(0.1)


def test_transformers_serve_answers_with_a_condensed_checkpoint(tmp_path):
    from transformers.cli.serve import Serve

    method = condense.CCA(window=256, summary="streaming", key_pooling="select", rep_bias="log_size")
    model, tokenizer = condense.demo_model()
    condense.apply(model, method).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # the number stands behind the window, inside entries
    lines = [line for line in demo_text().text.split("\n") if not line.startswith("The number of the")][:40]
    hidden, question = "The number of the quiet bridge is 4821.", "The number of the quiet bridge is"
    prompt = "\n".join([lines[0], hidden, *lines[1:], question])
    assert len(tokenizer(prompt).input_ids) > 2 * method.window
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    server = Serve(str(tmp_path), device="cpu", dtype="float32", port=port, non_blocking=True)
    try:
        _wait_for(f"http://localhost:{port}/health")
        body = {"model": str(tmp_path), "prompt": prompt, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"http://localhost:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = json.load(answer)["choices"][0]["text"]
    finally:
        server.kill_server()
    assert text.strip().startswith("4821")
