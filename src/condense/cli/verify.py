"""`condense verify`: measuring what the named settings lose of one's own model, on one's own text."""

from pathlib import Path
from typing import Annotated, Any

import typer

from condense.cli import models, options

LENGTHS, DEMO_LENGTHS = ("4K", "16K"), ("3K",)
HEADINGS = ("far", "other", "copy", "plain", "names")
LEGEND = (
    "cache: bytes on the device, of dense attention's. at: tokens of a text. far, other, copy: nats above dense "
    "attention on tokens that need far text, on other tokens, on copies. plain, names: share lost of hidden "
    "numbers, and of those whose names share words. steps: greedy ones with the same token. Dense attention's "
    "row: its loss, and the share it finds. Intervals and numbers of tokens and questions: --page."
)


def verify_command(
    model: Annotated[
        list[str] | None, typer.Argument(help=options.MODEL_HELP + " Or result files (.json), to show in one table.")
    ] = None,
    text: options.Texts = None,
    length: Annotated[
        list[str] | None,
        typer.Option(help="Tokens of a text, as 16384 or 16K; repeatable. Default: 4K and 16K; bundled: 3K."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help=options.CHOICES_HELP + " Default: every named setting.")
    ] = None,
    texts: Annotated[int, typer.Option(help="Texts of each kind and length.")] = 4,
    questions: Annotated[int, typer.Option(help="Hidden numbers per text and task, fewer where they do not fit.")] = 32,
    greedy: Annotated[int, typer.Option(help="Steps for which to compare greedy tokens.")] = 512,
    seed: Annotated[int, typer.Option(help="Decides which stretches of text and which numbers.")] = 0,
    json: options.Json = None,
    page: Annotated[Path | None, typer.Option(help="Write all tables to this Markdown file.")] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.Remote = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Measure what the named settings lose of a model on a text, and say which is the cheapest that loses nothing.

    Exit code 0: a setting passes, and the text shows it. 1: none passes, or nothing was shown. 2: bad input.
    """
    from condense.evaluate.verify_report import page as page_of
    from condense.files import whole_file
    from condense.models import choice_from_text, described
    from condense.named import NAMED_SETTINGS
    from condense.results import write_results

    options.check_targets(json=json, page=page, overwrite=overwrite)
    sources = model or []
    if sources and all(source.endswith(".json") for source in sources):
        given = {"json": json, "text": text, "length": length, "method": method}
        if name := next((name for name, value in given.items() if value), None):
            raise ValueError(f"{name}: result files are read here, and nothing is measured: leave out --{name}")
        contents = [_read(Path(source)) for source in sources]
    elif len(sources) > 1:
        raise ValueError(f"model: wanted one model, or result files that end in .json, got {', '.join(sources)}")
    else:
        name = sources[0] if sources else None
        chosen = {each: choice_from_text(each) for each in method or NAMED_SETTINGS}
        loaded, tokenizer, saved = models.load_model(name, dtype, device, device_map, trust_remote_code)
        if saved is not None:
            chosen = {f"as saved: {described(saved)}": saved} | chosen
        sizes = length or (DEMO_LENGTHS if name is None and not text else LENGTHS)
        lengths = tuple(options.parse_tokens("length", size) for size in sizes)
        numbers = {"texts": texts, "questions": questions, "greedy": greedy, "seed": seed}
        contents = [_measured(loaded, tokenizer, name, text or [], chosen, lengths=lengths, **numbers)]
    try:
        _print(contents)  # before files are written, which may fail on a full disk
    finally:  # write files even if results cannot be shown, as in a closed pipe
        if json is not None:
            write_results(json, contents[0], seed=seed, device=loaded.device, overwrite=overwrite)
        if page is not None:
            with whole_file(page, overwrite=overwrite) as file:
                file.write(page_of(contents).encode())
    if any(content["verdict"]["cheapest"] is None for content in contents):
        raise typer.Exit(1)


def _measured(
    loaded: Any, tokenizer: Any, name: str | None, text: list[str], chosen: dict[str, Any], **numbers: Any
) -> dict[str, Any]:
    """The content of a result file."""
    from condense.evaluate.verify import VerifyConfig, verify
    from condense.evaluate.verify_report import verdict
    from condense.results import plain

    config = VerifyConfig(**numbers)
    documents = options.read_texts(text)
    models.warn_of_length(loaded, max(config.lengths))
    with options.progress() as bar:
        task = bar.add_task("verifying", total=None)
        results = verify(
            loaded, tokenizer, documents, chosen, config,
            on_step=lambda total: bar.update(task, total=total, advance=1),
        )  # fmt: skip
    about = {"model": name or "bundled", "text": ", ".join(text) or "bundled", "dtype": str(loaded.dtype)[6:]}
    return about | plain({"config": config, "settings": results, "verdict": verdict(results)})


def _read(path: Path) -> dict[str, Any]:
    """The content of a result file of this command."""
    from json import JSONDecodeError, loads

    if not path.is_file():
        raise ValueError(f"model: no such file: {path}")
    try:
        content = loads(path.read_text(encoding="utf-8"))["results"]
        if not {"model", "settings", "verdict"} <= set(content):
            raise KeyError
    except (JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"model: wanted result files of condense verify --json, got {path}") from error
    return dict(content)


def _print(contents: list[dict[str, Any]]) -> None:
    """One table of all models, then the verdicts."""
    from condense.evaluate.verify_report import BARS, at_lengths, cells_of

    several = ["model"] if len(contents) > 1 else []
    headings = ["cache", "at", *HEADINGS, "steps", "ok"]
    table = options.plain_table(left=[*several, "setting"], right=headings, is_whole=True)
    for content in contents:
        for result, each in at_lengths(content):
            table.add_row(*([content["model"]] if several else []), *cells_of(result, each, short=True))
    options.plain_console().print(table)
    print(LEGEND, BARS, sep="\n")
    for content in contents:
        said = content["verdict"]["text"]
        print(f"{content['model']}: {said}" if several else said)
