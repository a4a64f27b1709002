"""Writing a file or a folder so that it appears complete or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(target: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """A file to write that appears as ``target`` when the block ends, and not at all if it fails.

    Missing folders are made. Permissions follow the umask, as for any new file.
    Raises FileExistsError at the end of the block if there is a ``target`` by then and ``overwrite`` is False.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as file:
            yield file
        if not overwrite:
            # creates the name or fails if it exists; a hard link would do both steps, but not every file system has it
            target.open("xb").close()
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        _name(error, target)
        raise


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that appears as ``target`` when the block ends, and not at all if it fails.

    Missing parents are made. Raises OSError at the end of the block if there is a ``target`` with contents by then.
    """
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(target)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        _name(error, target)
        raise


def _name(error: BaseException, target: Path) -> None:
    """Put the path into an error of the system that has none, such as that of a full disk."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(target)
