"""The bundled model under methods that it was not trained with: what can be read off without training anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from candidates import AnchoredDGA

import condense
from condense import CCA, DGA, Dense, Method, StreamingLLM
from condense.evaluate import passkey_sequences, retrieval, text_loss, text_sequences
from condense.tasks import SequenceBuilder, load_corpus, load_words

LENGTH, WINDOW, KEYS = 4096, 256, 8


def methods() -> Mapping[str, Method]:
    """By label; all but `own` are strangers to the model."""
    own = CCA(window=WINDOW, summary="streaming", key_pooling="select", rep_bias="log_size")
    last = DGA(window=WINDOW)
    focal = last.replace(summary="streaming", rep_bias="log_size")
    sparse = {"group_size": 32, "gamma": 1 / 32}
    prompt = focal.replace(selection="prompt", min_focal=0)
    anchored = AnchoredDGA(window=WINDOW, summary="streaming", rep_bias="log_size")
    return {
        "dense": Dense(),
        "own": own,
        "window": StreamingLLM(sink=4, window=492),
        "dga": last,
        "dga-streaming": last.replace(summary="streaming"),
        "dga-streaming-bias": focal,
        "dga-random": focal.replace(focal="random"),
        "anchored": anchored,
        "own-g=6": own.replace(group_size=6),
        "dga-sparse": focal.replace(**sparse),
        "anchored-sparse": anchored.replace(**sparse),
        **{f"dga-m={g}": focal.replace(group_size=g) for g in (4, 8, 32, 64)},
        **{f"dga-gamma={gamma}": focal.replace(gamma=gamma) for gamma in (0.3, 0.5, 0.9)},
        "prompt": prompt,
        "prompt-random": prompt.replace(focal="random"),
        "prompt-not-complementary": prompt.replace(complementary=False),
    }


def evaluate_bundled(test: tuple[Path, ...], cache: Path, sequences: int) -> dict[str, Any]:
    """Retrieval and text loss, in float32 on this machine's processor."""
    model, tokenizer = condense.demo_model()
    corpus = load_corpus(test, tokenizer, cache)
    builder = SequenceBuilder(tokenizer, corpus, load_words().held_out, LENGTH)
    asked = passkey_sequences(builder, sequences, keys=KEYS, form="question", seed=1)
    return {
        "length": LENGTH,
        "keys": KEYS,
        "retrieval": retrieval(model, methods(), asked),
        "text": text_loss(model, methods(), text_sequences(builder, sequences, seed=2)),
    }
