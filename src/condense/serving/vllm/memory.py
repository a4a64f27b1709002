"""Memory that the host, and a device, have left for pages of tokens."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the host has left, or the container, if that has a limit (cgroups of version 2)."""
    left: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no such files, or no limit, which is then "max"
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        left = min(left, limit - used + int(stat["inactive_file"]))
    return left


def room_of_pages(cache: Any, block_bytes: int) -> tuple[int, bool]:
    """Bytes of the pages on this process's device, while its model is measured: as many as the flags ask for, and
    False; else what the flags leave of the device's memory, and True: what the model is found to take is taken from it.

    cache: vLLM's ``CacheConfig``.
    """
    if cache.num_gpu_blocks_override:
        return cache.num_gpu_blocks_override * block_bytes, False
    if cache.kv_cache_memory_bytes:
        return cache.kv_cache_memory_bytes, False
    free, total = torch.cuda.mem_get_info()
    return free - int((1 - cache.gpu_memory_utilization) * total), True
