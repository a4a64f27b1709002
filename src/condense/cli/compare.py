"""`condense compare`: the same prompt under dense and condensed attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from condense.cli.options import METHOD_HELP, load_model, parse_method, read_text
from condense.demo import demo_prompt
from condense.evaluate.compare import Outcome, Prompt, compare
from condense.methods import CCA, Dense, Method, StreamingLLM
from condense.models import condensed_layers, restore
from condense.plots import method_labels, plot_comparison, require_matplotlib
from condense.results import refuse_existing, write_results

DEMO_METHODS = (
    Dense(),
    CCA(window=256, summary="streaming", key_pooling="select", rep_bias="log_size"),
    StreamingLLM(sink=4, window=492),
)


def compare_command(
    model: Annotated[str | None, typer.Option(help="Folder or hub name of a causal LM. Default: bundled.")] = None,
    text: Annotated[str | None, typer.Option(help="Text file, or - for standard input. Default: bundled.")] = None,
    question: Annotated[list[str] | None, typer.Option(help="Asked after the text; repeatable.")] = None,
    method: Annotated[list[str] | None, typer.Option(help=METHOD_HELP + " Repeatable.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens per answer.")] = 8,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ...")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this .png or .svg file.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing result files.")] = False,
) -> None:
    """Ask the same questions about a long text under dense and condensed attention, side by side."""
    for name, path in (("json", json), ("plot", plot)):
        if path is not None:
            refuse_existing(path, name, overwrite=overwrite)
    if plot is not None:
        require_matplotlib(plot)
    if text is None and question:
        raise ValueError("question needs a text of its own: add --text FILE")
    prompt = demo_prompt() if text is None else Prompt(read_text(text), question or [])
    loaded, tokenizer = load_model(model, dtype, device)
    methods: Sequence[Method] = [parse_method(spec) for spec in method or []]
    if not methods:
        saved = list(dict.fromkeys(condensed_layers(loaded).values()))
        methods = [Dense(), *saved] if saved else DEMO_METHODS if model is None else (Dense(), CCA(), StreamingLLM())
    restore(loaded)
    console = Console()
    steps = len(methods) * (1 + max(1, len(prompt.questions)))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("comparing", total=steps)
        outcomes = compare(
            loaded, tokenizer, methods, prompt,
            max_new_tokens=max_new_tokens, on_step=lambda: progress.advance(task),
        )  # fmt: skip
    _print(console, prompt, outcomes)
    content = {"model": model or "bundled", "prompt_questions": list(prompt.questions), "outcomes": outcomes}
    if json is not None:
        write_results(json, content, overwrite=overwrite)
    if plot is not None:
        plot_comparison(outcomes, plot)


def _print(console: Console, prompt: Prompt, outcomes: Sequence[Outcome]) -> None:
    labels = method_labels([outcome.method for outcome in outcomes])
    answers = Table(title="answers")
    answers.add_column("question")
    if prompt.expected:
        answers.add_column("right answer")
    for label in labels:
        answers.add_column(label, overflow="fold")
    for i, question in enumerate(prompt.questions or ["(the text goes on)"]):
        expected = [prompt.expected[i]] if prompt.expected else []
        answers.add_row(" ".join(question.split()), *expected, *(_first_line(o.answers[i]) for o in outcomes))
    console.print(answers)
    dense = outcomes[0]
    table = Table(title=f"{dense.text_tokens} tokens of text, {len(prompt.questions)} questions, greedy")
    for heading in ("method", "right", "first token", "per token", "KV cache", f"of {labels[0]}"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for label, outcome in zip(labels, outcomes, strict=True):
        table.add_row(
            label,
            "-" if outcome.correct is None else f"{outcome.correct}/{len(prompt.expected)}",
            f"{outcome.first_token_s:.2f} s",
            "-" if outcome.token_s is None else f"{outcome.token_s * 1e3:.1f} ms",
            f"{outcome.cache_bytes / 2**20:.2f} MiB",
            f"{outcome.cache_bytes / max(1, dense.cache_bytes):.1%}",
        )
    console.print(table)
    for label, outcome in zip(labels, outcomes, strict=True):
        console.print(f"{label}: {outcome.method}", highlight=False)


def _first_line(answer: str) -> str:
    return answer.splitlines()[0] if answer else ""
