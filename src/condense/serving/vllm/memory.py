"""Memory that the host has left for pages of tokens."""

from contextlib import suppress
from pathlib import Path

import psutil


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the host has left, or the container, if that has a limit (cgroups of version 2)."""
    left: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no such files, or no limit, which is then "max"
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        left = min(left, limit - used + int(stat["inactive_file"]))
    return left
