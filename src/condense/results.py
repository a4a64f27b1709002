"""Writing result files: JSON with the provenance of its numbers, complete or not at all."""

import dataclasses
import datetime
import hashlib
import io
import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from condense.files import whole_file
from condense.version import __version__

# integer dtype by bytes per number
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 2**24  # most numbers of a parameter that are widened to 64 bits at a time

_EXISTS = "{}: wanted a path that does not exist yet, got {}"
_REPLACES = "; overwrite=True (--overwrite) replaces it"


def provenance(seed: int | None = None, device: torch.device | None = None) -> dict[str, Any]:
    """The origin of a number: versions, device, git commit, seed and the date (UTC, ISO 8601).

    seed: of the run, None if it drew no numbers. device: where it ran, by default the current CUDA device if any.
    """
    return {
        "condense": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
        "commit": _commit(),
        "seed": seed,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device | None = None) -> str:
    """The name of a CUDA device, or the processor's architecture and its number of threads."""
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device is not None and device.type != "cpu":
        return str(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """A hash of the names, shapes, dtypes and numbers of all parameters, the same on every device.

    A parameter's numbers enter as the sum of their bits, read as integers, because that sum has no rounding error.
    Raises ValueError for parameters without numbers, as offloaded ones are.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"model must have all of its weights on devices, got {name} offloaded: use more devices, a dtype of "
                "fewer bytes, or the CPU"
            )
        bits = parameter.detach().reshape(-1).view(_BITS[parameter.element_size()])
        total = sum(int(part.sum(dtype=torch.int64)) for part in bits.split(_AT_ONCE))
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {total}\n".encode())
    return digest.hexdigest()


def write_results(
    path: str | Path,
    content: Mapping[str, Any],
    *,
    seed: int | None = None,
    device: torch.device | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``content`` as JSON under the key ``results``, next to ``provenance``.

    The file appears under its name only when it is complete, so an interrupt leaves either the old file or
    none. Dataclasses, paths, methods (anything with ``to_dict``), tuples and scalars of NumPy or PyTorch are
    converted; a number that is not finite becomes ``null``, because JSON has no other way to say it.

    path: missing folders are made. seed, device: of the provenance. overwrite: replace an existing file.
    Returns the path.
    Raises ValueError as `refuse_existing`, also for a file that somebody else wrote in the meantime.
    """
    target = Path(path)
    refuse_existing(target, "path", overwrite=overwrite)
    document = {"provenance": provenance(seed, device), "results": plain(content)}
    try:
        with whole_file(target, overwrite=overwrite) as binary, io.TextIOWrapper(binary, encoding="utf-8") as file:
            json.dump(document, file, separators=(",", ":"), allow_nan=False)
            file.write("\n")
    except FileExistsError as error:
        raise ValueError(_EXISTS.format("path", target) + _REPLACES) from error
    return target


def refuse_existing(path: Path, argument: str, *, overwrite: bool | None = None) -> None:
    """Raise ``ValueError`` if ``path`` exists and ``overwrite`` is not True, or if no file can be written there.

    overwrite: None where nothing is ever replaced, so that the message offers no such way.
    """
    if overwrite is not None and path.exists() and not path.is_file():
        kind = "folder" if path.is_dir() else "device or pipe"
        raise ValueError(f"{argument}: wanted a file, got the {kind} {path}")
    if os.path.lexists(path) and not overwrite:  # a dangling link exists too: no folder could take its place
        raise ValueError(_EXISTS.format(argument, path) + ("" if overwrite is None else _REPLACES))
    parent = next((folder for folder in path.absolute().parents if folder.exists()), path.absolute().parent)
    try:
        # try to write, because on some file systems the permission bits do not tell
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ValueError(f"{argument}: wanted a path that can be written, got {path}") from error


def plain(value: Any) -> Any:
    """Return ``value`` in the types that JSON knows, as `write_results` converts it."""
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def _commit() -> str | None:
    """The commit of the checkout that this file belongs to (``-dirty`` if tracked files differ)."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # fails for an installed copy inside somebody else's repository, whose commit would say nothing
        git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return None
