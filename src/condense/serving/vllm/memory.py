"""Memory that the host, and a device, have left for pages of tokens."""

import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from condense.serving.blocks import ServedLayer, blocks_of_request
from condense.serving.host import copied_bytes, slot_rows

# a child of vLLM's own logger, which alone has a handler
_logger = logging.getLogger("vllm.condense")


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the host has left, or the container, if that has a limit (cgroups of version 2)."""
    left: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no such files, or no limit, which is then "max"
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        left = min(left, limit - used + int(stat["inactive_file"]))
    return left


def rows_with_slots(config: Any, layers: Collection[ServedLayer]) -> int:
    """The number of requests that get slots for groups in host memory, asked while a model's memory is measured.

    If flags give the size of the pages, half of the memory that these leave is for slots; the other half for what is
    computed. Without such flags as many requests of the longest text get slots as fit with them. config: a
    ``VllmConfig``.
    """
    cache, longest = config.cache_config, config.model_config.max_model_len
    free, total = torch.cuda.mem_get_info()
    room, given = free - int((1 - cache.gpu_memory_utilization) * total), cache.kv_cache_memory_bytes
    if cache.num_gpu_blocks_override:
        given = cache.num_gpu_blocks_override * blocks_of_request(layers, longest).block_bytes
    rows = max(0, room - given) // 2 // copied_bytes(layers) if given else slot_rows(layers, longest, room)
    rows = min(rows, config.scheduler_config.max_num_seqs)
    _logger.info("Slots for copies of groups in host memory: those of %d requests", rows)
    return rows
