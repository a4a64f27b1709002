"""Loading a model with its texts, a bar, tables and files: for all commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from condense.cli import models, options
from condense.demo import demo_text
from condense.evaluate.compare import encode
from condense.models import MethodChoice
from condense.results import write_results


class Loaded(NamedTuple):
    """A model with stock attention, the method that it was saved with, and the token ids ``[n]`` of texts by name."""

    model: PreTrainedModel
    saved: MethodChoice | None
    ids: dict[str, Tensor]


def load(model: str | None, texts: list[str] | None, dtype: str | None, device: str | None) -> Loaded:
    """The model and the texts that the options name, by default the bundled ones. Raises ValueError as these do."""
    sources = list(dict.fromkeys(texts or ()))
    contents = {name: options.read_text(source) for name, source in zip(_names(sources), sources, strict=True)}
    loaded, tokenizer, saved = models.load_model(model, dtype, device, device_map=None, trust_remote_code=False)
    contents = contents or {"bundled": demo_text().text}
    return Loaded(loaded, saved, {name: encode(tokenizer, text, loaded)[0] for name, text in contents.items()})


def _names(sources: list[str]) -> list[str]:
    """Stems of the files, or as much of their paths as tells them apart; ``text`` for standard input."""
    paths = [Path("text" if source == "-" else source) for source in sources]
    longest = max((len(path.parts) for path in paths), default=0)
    tails = ([str(Path(*path.parts[-n:])) for path in paths] for n in range(1, longest + 1))
    ways = ([path.stem for path in paths], *tails)
    return next((names for names in ways if len(set(names)) == len(names)), sources)


@contextmanager
def steps(total: int | None) -> Iterator[Callable[[], None]]:
    """A bar of ``total`` steps (None: not known); the function takes one."""
    with options.progress() as bar:
        task = bar.add_task("reading", total=total)
        yield lambda: bar.advance(task)


class Outputs(NamedTuple):
    """Result files of a command: its options."""

    model: str | None
    json: Path | None
    plot: Path | None
    overwrite: bool

    def checked(self) -> Outputs:
        """The same. Raises ValueError, before any work, for files that cannot be written."""
        options.check_targets(json=self.json, plot=self.plot, overwrite=self.overwrite)
        return self

    def write(self, content: dict[str, Any], loaded: PreTrainedModel | None = None) -> None:
        """Write ``content``, beside the model and where it was measured, if a file was asked for."""

        if self.json is not None:
            content = content if loaded is None else {"model": self.model or "bundled", **content}
            device = None if loaded is None else loaded.device
            write_results(self.json, content, device=device, overwrite=self.overwrite)


def show(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> None:
    """A table, and a note below it."""
    table = options.plain_table(title)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right", overflow="fold", no_wrap=i > 0)
    for row in rows:
        table.add_row(*row)
    options.plain_console().print(table)
    if note:
        options.plain_console().print(note)
