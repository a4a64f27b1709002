"""`condense calibrate`: the cheapest method for every layer that keeps a model's quality on a text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from condense.cli import models, options

if TYPE_CHECKING:
    from rich.table import Table

    from condense.calibration import Calibration, CurvePoint, LayerLoss
    from condense.calibration.report import Mean
    from condense.methods import Method

# length and number of texts for which the bundled text is long enough
DEMO_LENGTH, DEMO_TEXTS = 448, 4


def calibrate_command(
    model: options.Model = None,
    text: options.Texts = None,
    budget_nats: Annotated[
        float | None, typer.Option(help="The most that may be lost, in nats per token. Default without --cache: 0.02.")
    ] = None,
    cache: Annotated[
        float | None, typer.Option(help="The share of the dense cache on the device that is small enough, as in 0.09.")
    ] = None,
    cache_length: Annotated[
        str | None, typer.Option(help="Tokens to count the cache at, as 131072 or 128K. Default: --length.")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help=options.METHOD_HELP
            + " Repeatable. Default: dense (not without host memory), recall with all groups open and with some, cca "
            "(lca on latents) and a window."
        ),
    ] = None,
    host_memory: Annotated[
        bool, typer.Option(help="Whether tokens may lie in host memory; decides the default candidates.")
    ] = True,
    length: Annotated[str | None, typer.Option(help="Tokens of each text, as 16384 or 16K. Default: 4K.")] = None,
    texts: Annotated[int | None, typer.Option(help="Texts to measure, and as many to verify. Default: 8.")] = None,
    hidden_numbers: Annotated[int, typer.Option(help="Numbers to hide in as many further texts and to ask for.")] = 0,
    min_found: Annotated[float, typer.Option(help="The share to find of numbers that dense attention finds.")] = 0.99,
    seed: Annotated[int, typer.Option(help="Decides which stretches of text and which numbers.")] = 0,
    output: Annotated[Path, typer.Option(help="The allocation; --method @FILE reads it.")] = Path("allocation.json"),
    measured: Annotated[
        Path | None, typer.Option(help="Keeps what was measured, to go on with. Default: beside the output.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw quality against cache into this .png or .svg.")] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.Remote = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Find the cheapest method for every layer that keeps the model's quality on a text, and write it down."""
    from condense.calibration import CalibrationConfig, calibrate
    from condense.files import sole_writer
    from condense.methods import Method

    options.check_targets(output=output, plot=plot, overwrite=overwrite)
    kept = measured or output.with_suffix(".measured.json")
    for name, path in (("output", output), ("plot", plot)):
        if path is not None and kept.resolve() == path.resolve():
            raise ValueError(f"measured must be another file than {name}, got {kept} for both")
    options.check_targets(measured=kept, overwrite=True)  # existing measurements are used and extended
    is_demo = model is None and not text
    config = CalibrationConfig(
        budget_nats=0.02 if budget_nats is None and cache is None else budget_nats,
        cache=cache,
        min_found=min_found,
        candidates=tuple(map(Method.parse, candidate or ())),
        host_memory=host_memory,
        length=options.parse_tokens("length", length) if length is not None else DEMO_LENGTH if is_demo else 4096,
        texts=texts if texts is not None else DEMO_TEXTS if is_demo else 8,
        hidden_numbers=hidden_numbers,
        cache_length=None if cache_length is None else options.parse_tokens("cache_length", cache_length),
        seed=seed,
    )
    contents = options.read_texts(text)
    with sole_writer(output):
        loaded, tokenizer, _ = models.load_model(model, dtype, device, device_map, trust_remote_code)
        models.warn_of_length(loaded, config.length)
        with options.progress() as bar:
            task = bar.add_task("measuring", total=None)

            def on_estimate(forwards: int) -> None:
                said = f"about {forwards:,} forwards of {config.length:,} tokens. {kept} keeps what is measured"
                bar.console.print(said, soft_wrap=True)
                bar.update(task, total=forwards)

            on_forward = partial(bar.advance, task)
            result = calibrate(
                loaded, tokenizer, contents, config, measured=kept, on_estimate=on_estimate, on_forward=on_forward
            )
        result.save(output, device=loaded.device, overwrite=overwrite)
    _print(result)
    if plot is not None:
        _plot(result, plot)
    print(f"written: {output}; use it with --method {quote(f'@{output}')}")


def _print(result: Calibration) -> None:
    """Losses layer by layer, the curve, and what was chosen."""
    from condense.models import described
    from condense.plots import method_labels

    config, console = result.config, options.plain_console()
    names = dict(zip(config.candidates, method_labels(config.candidates), strict=True))
    numbers = config.hidden_numbers > 0
    console.print(_layers("each layer alone: divergence in nats per token", result, names, lambda loss: loss.kl))
    if numbers:
        title = "the same on the answers to the hidden numbers"
        console.print(_layers(title, result, names, lambda loss: loss.answers_kl))
    for method, name in names.items():
        if name != type(method).__name__:  # several candidates are of this kind
            print(f"{name}: {method}")

    headings = ["cache", "host", "divergence", "loss", *(["found"] if numbers else [])]
    title = f"quality against cache at {config.counted_length:,} tokens"
    curve = options.plain_table(title, left=["layers"], right=headings)
    for point in (*result.uniform, *(point for point in result.curve if point not in result.uniform)):
        curve.add_row(*_cells(point, names), style="bold" if point == result.chosen else None)
    console.print(curve)
    print(f"chosen, {result.chosen.cache:.1%} of the dense cache: {described(result.allocation)}")
    print(f"on held-out text: {result.verified.quality()}, {result.verified.nats} nats of loss above dense")
    for doubt in result.doubts:
        print(doubt)
    if result.steps_back > 0:
        print(f"others that failed the goals on held-out or on measured text: {result.steps_back}")


def _layers(
    title: str, result: Calibration, names: dict[Method, str], read: Callable[[LayerLoss], Mean | None]
) -> Table:
    """A table of ``read`` for every layer and its candidates, without the errors, which the allocation's file has."""
    losses = {(loss.layer, loss.method): str(read(loss)).partition("±")[0] for loss in result.layers}
    methods = dict.fromkeys(method for _, method in losses)
    layers = dict.fromkeys(layer for layer, _ in losses)
    rows = [(str(layer), *(losses.get((layer, method), "") for method in methods)) for layer in layers]
    return options.plain_table(title, right=["layer", *(names[method] for method in methods)], rows=rows)


def _cells(point: CurvePoint, names: dict[Method, str]) -> list[str]:
    used = list(point.methods.values())
    kinds = " + ".join(f"{used.count(method)} {names[method]}" for method in names if method in used)
    found = [] if point.found is None else [f"{point.found[0]}/{point.found[2]}"]
    shares = [f"{share:.1%}" for share in (point.cache, point.host)]
    return [kinds, *shares, str(point.kl), f"{point.nats.mean:+.4f}", *found]


def _plot(result: Calibration, path: Path) -> None:
    """Divergence against the share of the cache: the path, and each candidate in all layers."""
    from condense.plots import method_labels, plot_lines

    names = method_labels(result.config.candidates)
    kinds = {"by layer": result.curve} | {
        f"{name} in all layers": (point,) for name, point in zip(names, result.uniform, strict=True)
    }
    lines = {name: ([100 * point.cache for point in of], [point.kl.mean for point in of]) for name, of in kinds.items()}
    plot_lines({"cache on the device, % of dense": lines}, path, x_label="", y_label="divergence, nats per token")
