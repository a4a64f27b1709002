"""`condense eval`: lm-evaluation-harness's tasks under several attention methods."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from condense.cli import models, options


def eval_command(
    task: Annotated[
        list[str],
        typer.Option(help="Task, group or tag of the harness, or one of our own, such as text_loss; repeatable."),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the results; it must not exist yet.")],
    model: Annotated[str | None, typer.Option(help=options.MODEL_HELP + " An adapter's folder too.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help=options.CHOICES_HELP + " Default: what the model was saved with.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data files; docs/guides/evaluate.md says which.")] = None,
    length: Annotated[
        list[str] | None,
        typer.Option(help="Tokens, as 16384 or 16K, for tasks of several lengths; repeatable. Default: the task's."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="First documents of each task only.", min=1)] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples in the prompt. Default: the task's.", min=0)] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time.", min=1)] = 1,
    max_length: Annotated[
        str | None, typer.Option(help="Tokens the model may read, as 32768 or 32K. Default: its own.")
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.Remote = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the tokenizer's chat template.")] = False,
    run_generated_code: Annotated[
        bool, typer.Option("--run-generated-code", help="Allow tasks that run the programs the model writes.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output.")] = False,
) -> None:
    """Score a model on lm-evaluation-harness's tasks under several methods, side by side.

    The output folder holds predictions.jsonl, metrics.json and env.json.
    """
    from condense.evaluate.harness import Score, Settings, check_names, evaluate
    from condense.methods import Dense, Method
    from condense.models import MethodChoice, choice_from_text, described
    from condense.results import refuse_existing

    lengths = tuple(dict.fromkeys(options.parse_tokens("length", each) for each in length or ()))
    most = None if max_length is None else options.parse_tokens("max_length", max_length, 2)
    check_names(task)
    if not resume:
        if output.exists():
            raise ValueError(f"output: wanted a folder that does not exist yet, got {output}; --resume goes on with it")
        refuse_existing(output / "env.json", "output")
    if data is not None and not data.is_dir():
        raise ValueError(f"data: wanted a folder, got {data}")
    methods: dict[str, MethodChoice] = {text: choice_from_text(text) for text in method or ()}
    if run_generated_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    loaded, tokenizer, saved = models.load_model(model, dtype, device, device_map, trust_remote_code)
    if not methods:
        methods = {described(saved): saved} if saved is not None else {"dense": Dense()}
        methods |= {options.DEMO_METHOD: Method.parse(options.DEMO_METHOD)} if model is None else {}
    settings = Settings(
        tasks=tuple(dict.fromkeys(task)),
        lengths=lengths,
        limit=limit,
        num_fewshot=num_fewshot,
        max_length=most,
        chat=chat,
        data=data,
        run_generated_code=run_generated_code,
        trust_remote_code=trust_remote_code,
    )
    on_method = partial(options.plain_console(stderr=True).print, style="dim", soft_wrap=True)
    scores = evaluate(
        loaded, tokenizer, methods, settings, output, batch_size=batch_size, resume=resume, on_method=on_method
    )
    # a row per figure and a column per method, with standard errors
    rows: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        part = "".join(f" {field} {value}" for field, value in score.by.items())
        rows.setdefault((score.task + part, score.metric.removesuffix(",none")), []).append(score)
    table = options.plain_table(left=["task", "metric"], right=[*dict.fromkeys(score.method for score in scores), "n"])
    for (name, metric), row in rows.items():
        cells = [f"{s.value:.3f}" + ("" if s.stderr is None else f" ± {s.stderr:.3f}") for s in row]
        table.add_row(name, metric, *cells, str(row[0].n))
    options.plain_console().print(table)
    print(output)
