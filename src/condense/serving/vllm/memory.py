"""Memory that the host, and a device, have left for pages of tokens."""

import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from condense.serving.blocks import ServedLayer, blocks_of_request
from condense.serving.host import slot_rows

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

    That many requests of the longest text fit into the pages that the flags ask for, slots beside them; without such
    flags, with their slots, into what vLLM may still take of the device. config: a ``VllmConfig``.
    """
    cache, longest = config.cache_config, config.model_config.max_model_len
    free, total = torch.cuda.mem_get_info()
    room, in_room = free - int((1 - cache.gpu_memory_utilization) * total), True
    if cache.num_gpu_blocks_override:
        room, in_room = cache.num_gpu_blocks_override * blocks_of_request(layers, longest).block_bytes, False
    elif cache.kv_cache_memory_bytes:
        room, in_room = cache.kv_cache_memory_bytes, False
    rows = min(slot_rows(layers, longest, room, in_room=in_room), config.scheduler_config.max_num_seqs)
    _logger.info("Slots for copies of groups in host memory: those of %d requests", rows)
    return rows
