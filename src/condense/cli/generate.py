"""`condense generate`: text from a model with condensed attention."""

from typing import Annotated, Any

import typer

from condense.cli import models, options


def generate_command(
    prompt: Annotated[str | None, typer.Argument(help="The prompt. Without it: --text.")] = None,
    text: Annotated[str | None, typer.Option(help="Read the prompt from this file, - for standard input.")] = None,
    model: options.Model = None,
    method: Annotated[
        list[str] | None, typer.Option(help=options.CHOICE_HELP + " Default: what the model was saved with.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0: greedy.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0, max=2**64 - 1)] = 0,
    dtype: options.Dtype = None,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.Remote = False,
    chat: Annotated[bool, typer.Option("--chat", help=options.CHAT_HELP)] = False,
) -> None:
    """Continue a prompt, token by token as it comes."""
    import torch
    from transformers import TextStreamer

    from condense.evaluate.compare import attention_of, chat_message, encode
    from condense.methods import Dense
    from condense.models import choice_from_text
    from condense.models.families import check_learned_positions

    class Streamer(TextStreamer):
        def put(self, value: Any) -> None:
            """Print text as it comes; the first new token removes the bar that showed the reading of the prompt."""
            if not self.next_tokens_are_prompt:
                bar.stop()
            super().put(value)

    if (prompt is None) == (text is None):
        raise ValueError("give the prompt either as an argument or with --text FILE")
    content = options.read_text(text) if text is not None else prompt or ""
    if not content.strip():
        raise ValueError("prompt must not be empty")
    if not method and model is None:
        method = [options.DEMO_METHOD]
    chosen = choice_from_text(*method) if method else None
    loaded, tokenizer, saved = models.load_model(model, dtype, device, device_map, trust_remote_code)
    if chosen is None:
        chosen = saved or Dense()
    content = "".join(chat_message(tokenizer, content)) if chat else content
    ids = encode(tokenizer, content, loaded, special=not chat)
    check_learned_positions(loaded.config, "prompt and new tokens", ids.shape[1] + max_new_tokens)
    models.warn_of_length(loaded, ids.shape[1] + max_new_tokens)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    with attention_of(loaded, chosen), options.progress() as bar:
        models.warn_of_defaults(loaded, [chosen], saved)
        bar.add_task(f"reading {ids.shape[1]} tokens", total=None)
        loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            use_cache=True,
            max_new_tokens=max_new_tokens,
            num_beams=1,  # beams, which the model's own settings may ask for, cannot be printed as they come
            num_return_sequences=1,
            streamer=Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            pad_token_id=0,  # a single row is not padded, but without one generate warns
            **sampling,
        )
