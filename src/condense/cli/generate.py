"""`condense generate`: text from a model with condensed attention."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from transformers import TextStreamer

from condense.cli.options import METHOD_HELP, load_model, parse_method, read_text
from condense.evaluate.compare import attention_of, check_positions, encode
from condense.models import condensed_layers, restore


def generate_command(
    prompt: Annotated[str | None, typer.Argument(help="The prompt. Without it: --text.")] = None,
    text: Annotated[str | None, typer.Option(help="Read the prompt from this file, - for standard input.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name of a causal LM. Default: bundled.")] = None,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP + " Default: what the model was saved with.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0: greedy.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ...")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
) -> None:
    """Continue a prompt, token by token as it comes."""
    if (prompt is None) == (text is None):
        raise ValueError("give the prompt either as an argument or with --text FILE")
    content = read_text(text) if text is not None else prompt or ""
    if not content.strip():
        raise ValueError("prompt must not be empty")
    chosen = None if method is None else parse_method(method)
    loaded, tokenizer = load_model(model, dtype, device)
    saved = next(iter(condensed_layers(loaded).values()), None)
    if chosen is None and model is None:
        chosen = parse_method("cca:window=256,summary=streaming,key_pooling=select,rep_bias=log_size")
    ids = encode(tokenizer, content, loaded)
    check_positions(loaded, ids.shape[1] + max_new_tokens)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    if chosen is not None and saved is not None:
        restore(loaded)
    with attention_of(loaded, chosen) if chosen is not None else torch.no_grad():
        loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            **sampling,
        )
