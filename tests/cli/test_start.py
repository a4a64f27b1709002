"""The start of the command: help and version without torch, Ctrl-C in one line while the library is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import condense
import condense_command

# every command's help, in one process; then, command by command, the libraries that are imported by now
HELP = """
import contextlib, io, sys
import typer
import condense_command

def commands(group, path=()):
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))

def shown(*arguments):
    sys.argv = ["condense", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        condense_command.main()
    return out.getvalue()

sys.stdout.write(shown("--version"))
from condense.cli.main import app
for path in commands(typer.main.get_command(app)):
    assert "Usage: " in shown(*path, "--help"), path
    heavy = {"torch", "transformers", "numpy", "rich"} & sys.modules.keys()
    sys.stdout.write(f"{' '.join(path)}: {sorted(heavy)}\\n")
"""
IMPORTING = """
import builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import condense_command

stock, (_, interrupted_at, *sys.argv) = builtins.__import__, sys.argv

def interrupted(name, *args, **kwargs):
    if name == interrupted_at:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as error:  # as transformers' lazy import does
            raise ModuleNotFoundError("could not import") from error
    return stock(name, *args, **kwargs)

builtins.__import__ = interrupted
condense_command.main()
"""


def run_alone(code, *arguments):
    path = {"PYTHONPATH": str(Path(condense_command.__file__).parent)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=os.environ | path, capture_output=True, text=True)


def test_help_and_version_import_no_large_library():
    done = run_alone(HELP)
    assert done.stderr == ""
    version, *helps = done.stdout.splitlines()
    assert version.startswith(f"condense {condense.__version__} (torch ")
    assert len(helps) == 12  # that of the whole, and of each command
    assert [line for line in helps if not line.endswith(": []")] == []


@pytest.mark.parametrize("name", ["condense.cli.main", "torch"])
def test_ctrl_c_during_the_imports_is_one_line(name):
    done = run_alone(IMPORTING, name, "condense", "methods")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "condense: interrupted\n")


def test_a_package_that_is_imported_already_is_not_run_again():
    methods = condense.Method, condense.CCA
    condense_command._postpone("condense")()
    assert (condense.Method, condense.CCA) == methods
    assert sys.modules["condense"] is condense
