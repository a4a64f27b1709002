"""Fixtures that several folders share: a small text with its tokenizer and corpus, and the backends."""

import os
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from condense.ops.torch import attend as torch_attend
from condense.tasks import Corpus, encode_corpus
from condense.train import train_tokenizer

# kernels need a GPU or, in a process of their own, Triton's interpreter
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [
    *([] if torch.cuda.is_available() else ["gpu"]),
    *([] if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else ["gpu/test_hopper.py"]),
    *([] if torch.cuda.is_available() or _INTERPRETED else ["triton_kernels"]),
]

PARAGRAPH = (
    "The harbour lay quiet under the moon, and 27 boats rocked at their moorings.\n"
    "“Who goes there?” cried the watchman;\tnobody answered him.\n\n"
    "In the year 1894 a letter came, written in a small careful hand.\n"
)


@pytest.fixture(scope="session")
def text() -> str:
    return "".join(f"Chapter {n}\n\n{PARAGRAPH}" for n in range(60))


@pytest.fixture(scope="session")
def text_file(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer(text: str) -> PreTrainedTokenizerBase:
    return train_tokenizer([text], vocab_size=400)


@pytest.fixture(scope="session")
def corpus(text: str, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    return encode_corpus([text], tokenizer)


@pytest.fixture(params=["reference", "torch", "torch-blocks"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each backend, and the torch backend with blocks so small that short sequences take many."""
    if request.param == "torch-blocks":
        monkeypatch.setattr(torch_attend, "_block_size", lambda device, ratio: 6)
    return request.param.removesuffix("-blocks")
