"""Writing a file or a folder so that it appears complete or not at all, and by one process at a time."""

import errno
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn

from filelock import FileLock, Timeout

_log = logging.getLogger(__name__)
_OF_RUST = re.compile(r"\(os error (\d+)\)")  # the end of a system's error as tokenizers and safetensors report it


@contextmanager
def whole_file(target: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """A file to write that appears as ``target`` when the block ends, and not at all if it fails.

    Missing folders are made. Permissions follow the umask, as for any new file. An interrupt after the block leaves the
    whole file, as ``target`` or as a hidden ``.part`` beside it.
    Raises FileExistsError at the end of the block if there is a ``target`` by then and ``overwrite`` is False. File
    systems without hard links replace a target that appears in that very moment.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as file:
            yield file
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        _raise_named(error, target)
    try:
        if overwrite or not _linked(temporary, target):
            os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _linked(file: Path, target: Path) -> bool:
    """Rename a file by a hard link, FileExistsError if there is a ``target``; False if the system has no such links."""
    try:
        os.link(file, target)
    except OSError:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        return False
    file.unlink()
    return True


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
        _raise_named(error, target)


@contextmanager
def sole_writer(output: Path) -> Iterator[None]:
    """Keep other callers, in other processes, from writing ``output``, a file or folder, during a ``with`` block.

    The system locks a hidden file beside it, which is removed at the end. The lock of a process that dies ends with it.
    Where the file system has no locks, a warning says so. Raises ValueError if another process has the lock.
    """
    output = output.resolve()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # FileLock reports a lock file that cannot be written as one that another process holds
        tempfile.TemporaryFile(dir=output.parent).close()
    except OSError as error:
        raise ValueError(f"output: wanted a path that can be written, got {output}: {error.strerror}") from error
    file = output.parent / f".{output.name}.lock"
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"output: wanted one that no other run writes, got {output}, which a running process writes: wait for it, "
            "stop it, or choose another output"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            raise
        _log.warning(
            "%s has no locks (%s): see to it that no other run writes %s", output.parent, error.strerror, output
        )
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is still locked, so that another process's lock is never removed
        lock.release()


def _raise_named(error: BaseException, target: Path) -> NoReturn:
    """Raise the error that ended a block; a system's error, such as a full disk, as an OSError with the path."""
    if isinstance(error, OSError) and error.errno is None:  # NumPy raises this if a write stops short
        raise OSError(f"could not write {target}: {error}") from error
    if isinstance(error, OSError) and error.filename is None:
        error.filename = str(target)
    elif isinstance(error, Exception) and (number := _OF_RUST.search(str(error))):
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(target)) from error
    raise error
