"""Entry point of the command `condense`: answers Ctrl-C in one line while the libraries are still being imported."""

import sys


def main() -> None:
    """Import the command line, which takes seconds, and run it."""
    try:
        from condense.cli.main import main as run
    except KeyboardInterrupt:
        print("condense: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
