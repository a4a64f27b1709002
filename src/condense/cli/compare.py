"""`condense compare`: the same prompt under dense attention, Recall and condensed attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from condense.cli import models, options

if TYPE_CHECKING:
    from condense.evaluate.compare import Outcome, Prompt

DEMO_METHODS = ("dense", "recall-device", options.DEMO_METHOD, "streaming_llm:sink=4,window=492")
METHODS = ("dense", "recall-device", "pooled", "streaming_llm")
SLOW_ON_CPU = (
    "Recall is slow on a CPU: without a GPU's kernels a step unpacks and copies the tokens that it opens, and prompts "
    "read by Recall see all tokens under a mask."
)


def compare_command(
    model: options.Model = None,
    text: Annotated[str | None, typer.Option(help="Text file, or - for standard input. Default: bundled.")] = None,
    question: Annotated[list[str] | None, typer.Option(help="Asked after the text; repeatable.")] = None,
    method: Annotated[list[str] | None, typer.Option(help=options.CHOICES_HELP)] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens per answer.")] = 8,
    dtype: options.Dtype = None,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.Remote = False,
    chat: Annotated[bool, typer.Option("--chat", help=options.CHAT_HELP)] = False,
    json: options.Json = None,
    plot: options.Plot = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Ask the same questions about a long text under dense attention, Recall and condensed attention, side by side."""
    from condense.demo import demo_prompt
    from condense.evaluate.compare import Prompt, compare
    from condense.methods import Dense
    from condense.models import choice_from_text
    from condense.plots import plot_comparison
    from condense.results import write_results

    options.check_targets(json=json, plot=plot, overwrite=overwrite)
    if text is None and chat:
        raise ValueError("--chat needs a text of its own: add --text FILE")
    if text is None and question:
        raise ValueError("question needs a text of its own: add --text FILE")
    prompt = demo_prompt() if text is None else Prompt(options.read_text(text), question or [], chat=chat)
    given = [choice_from_text(text) for text in method or []]
    loaded, tokenizer, saved = models.load_model(model, dtype, device, device_map, trust_remote_code)
    shown = [choice_from_text(each) for each in (DEMO_METHODS if model is None else METHODS)]
    methods = given or (shown if saved is None else [Dense(), saved])
    steps = len(methods) * (1 + max(1, len(prompt.questions)))
    with options.progress() as bar:
        on_step = partial(bar.advance, bar.add_task("comparing", total=steps))
        outcomes = compare(loaded, tokenizer, methods, prompt, max_new_tokens=max_new_tokens, on_step=on_step)
    models.warn_of_defaults(loaded, methods, saved)
    models.warn_of_length(loaded, outcomes[0].text_tokens)
    dtype_name = str(loaded.dtype).removeprefix("torch.")
    content = {
        "model": model or "bundled",
        "dtype": dtype_name,
        "text": text or "bundled",
        "questions": prompt.questions,
        "expected": prompt.expected,
        "max_new_tokens": max_new_tokens,
        "outcomes": outcomes,
    }
    try:
        _print(prompt, outcomes, dtype_name, on_cpu=loaded.device.type == "cpu")
    finally:  # write results even if they cannot be shown, as in a closed pipe
        if json is not None:
            write_results(json, content, device=loaded.device, overwrite=overwrite)
        if plot is not None:
            plot_comparison(outcomes, plot)


def _print(prompt: Prompt, outcomes: Sequence[Outcome], dtype: str, *, on_cpu: bool) -> None:
    from condense.methods import Dense
    from condense.models import described, methods_of
    from condense.plots import method_labels

    console, labels = options.plain_console(), method_labels([outcome.method for outcome in outcomes])
    known = ["right answer"] if prompt.expected else []
    answers = options.plain_table("answers", left=["question", *known, *labels])
    for i, question in enumerate(prompt.questions or ["(the text goes on)"]):
        expected = [prompt.expected[i]] if prompt.expected else []
        first_lines = [(o.answers[i].splitlines() or [""])[0] for o in outcomes]
        answers.add_row(" ".join(question.split()), *expected, *first_lines)
    console.print(answers)
    base = next((i for i, outcome in enumerate(outcomes) if isinstance(outcome.method, Dense)), 0)
    title = f"{outcomes[0].text_tokens} tokens of text, {len(prompt.questions)} questions, greedy, {dtype}"
    headings = ("right", "first token", "per token", "cache on\nthe device", f"of\n{labels[base]}", "in host\nmemory")
    table = options.plain_table(title, left=["method"], right=headings)
    for label, outcome in zip(labels, outcomes, strict=True):
        table.add_row(
            label,
            "-" if outcome.correct is None else f"{outcome.correct}/{len(prompt.expected)}",
            f"{outcome.first_token_s:.2f} s",
            "-" if outcome.token_s is None else f"{outcome.token_s * 1e3:.1f} ms",
            f"{outcome.device_bytes / 2**20:.2f} MiB",
            f"{outcome.device_bytes / max(1, outcomes[base].device_bytes):.1%}",
            f"{outcome.host_bytes / 2**20:.2f} MiB" if outcome.host_bytes else "-",
        )
    console.print(table)
    for label, outcome in zip(labels, outcomes, strict=True):
        print(f"{label}: {described(outcome.method)}")
    if on_cpu and any(each.layout.choice is not None for outcome in outcomes for each in methods_of(outcome.method)):
        print(SLOW_ON_CPU)
