"""Entry point of the command `condense`: help and version at once, Ctrl-C in one line while libraries are imported."""

import functools
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the command line; the library, which takes seconds to import, is loaded when a command needs it."""
    # a shell may have set that interrupts of a job in the background are ignored
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:
        signal.signal(signal.SIGINT, _leave)
    execute = _postpone("condense")
    from condense.cli.main import main as run

    def load() -> None:
        execute()
        if heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    run(load)


@functools.cache
def _postpone(name: str) -> Callable[[], None]:
    """Make a package known without running its ``__init__.py``, so that light modules in it can be imported before.

    Returns a function that runs it once; if the package is imported already, one that does nothing.
    """
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    if name in sys.modules:
        return lambda: None
    loader, package = spec.loader, importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    return functools.cache(lambda: loader.exec_module(package))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Leave at once: transformers' lazy import would make an import error, with a traceback, of an exception."""
    os.write(2, b"condense: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
