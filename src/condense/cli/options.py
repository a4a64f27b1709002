"""What command lines share: methods as text, models, texts, devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from condense.config import method_from_dict
from condense.demo import demo_model
from condense.methods import Method

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
METHOD_HELP = "A method and its settings, e.g. 'dense' or 'cca:group_size=16,window=1024'."


def parse_method(text: str) -> Method:
    """A method from ``name`` or ``name:setting=value,...``. Raises ValueError for anything else."""
    name, _, settings = text.partition(":")
    fields: dict[str, Any] = {"method": name.strip()}
    for part in filter(None, settings.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"method settings must look like name=value, got {part!r} in {text!r}")
        fields[key.strip()] = _value(value.strip())
    return Method.parse(method_from_dict(fields).to_dict())


def _value(text: str) -> Any:
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def load_model(
    model: str | None, dtype: str | None, device: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The bundled model, or the one in a local folder or on the hub, in evaluation mode on its device.

    Raises ValueError for an unknown dtype or device, OSError for a model that cannot be found.
    """
    chosen = _device(device)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    torch_dtype = DTYPES[dtype] if dtype else torch.float32 if chosen.type == "cpu" else torch.bfloat16
    if model is None:
        loaded, tokenizer = demo_model(dtype=torch_dtype)
    else:
        if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
            raise ValueError(f"model: no such folder: {model}")
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch_dtype)
        tokenizer = AutoTokenizer.from_pretrained(model)
    return loaded.to(chosen).eval(), tokenizer


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be a PyTorch device such as cpu or cuda, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: CUDA is not available here; use cpu")
    return device


def read_text(source: str) -> str:
    """The text in a file, or on standard input for ``-``. Raises ValueError if it is missing or empty."""
    if source == "-":
        text = sys.stdin.read()
    else:
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"text: no such file: {source}")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"text: {source} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"text: {'standard input' if source == '-' else source} is empty")
    return text
