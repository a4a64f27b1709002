"""Entry point of the command `condense`: answers Ctrl-C in one line while the libraries are still being imported."""

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Import the command line, which takes seconds, and run it."""
    # a shell may have set that interrupts of a job in the background are ignored
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:
        signal.signal(signal.SIGINT, _leave)
    from condense.cli.main import main as run

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Leave at once: transformers' lazy import would make an import error, with a traceback, of an exception."""
    os.write(2, b"condense: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
