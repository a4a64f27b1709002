"""Pages in host memory: as many as blocks, refused with the number that fits."""

import re

import pytest
import torch

import condense
from condense.ops.step import record_format
from condense.serving.blocks import ServedLayer, page_sizes
from condense.serving.host import HostMemory, host_bytes
from condense.serving.plan import serving_plan
from condense.serving.vllm.memory import available_bytes

HOST = condense.Recall(group_size=4, window=24, store="host", store_bits=4)
LAYERS = [
    ServedLayer(serving_plan(method), 2, (16, 32), torch.float32)
    for method in (
        HOST.replace(store="device"),
        HOST,
        HOST.replace(store_bits=8),
        condense.CCA(group_size=4, window=24),
    )
] + [ServedLayer(None, 2, (16, 32), torch.float32)]
FAR = page_sizes(LAYERS).far
BLOCKS = torch.empty(10, 2, FAR // 4, 1, dtype=torch.uint8)


def test_a_page_holds_what_records_leave_out():
    memory, whole = HostMemory(LAYERS, ranks=1), record_format(LAYERS[0].plan.settings, (16, 32), torch.float32)
    device, four, eight, *others = (memory.pages_of(str(i), x, BLOCKS, 10**9) for i, x in enumerate(LAYERS))
    assert device is None
    assert others == [None, None]
    assert four.shape == (10, 2, FAR // 4, whole.nbytes - LAYERS[1].slot_bytes)
    assert four[0].nbytes + eight[0].nbytes == host_bytes(LAYERS)
    # where an engine pads pages to one size, a page is as large as several
    padded = memory.pages_of("1", LAYERS[1], BLOCKS.repeat(1, 1, 3, 1), 10**9)
    assert padded.nbytes == 3 * four.nbytes
    assert LAYERS[0].far_bytes(FAR) == LAYERS[1].far_bytes(FAR) + four[0].nbytes


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_than_the_host_has_is_refused_with_the_number_of_blocks_that_fit(ranks):
    memory, free = HostMemory(LAYERS, ranks), 9 * ranks * host_bytes(LAYERS)
    with pytest.raises(ValueError, match=r"for 10 blocks, of which the host has 0\.0") as error:
        memory.pages_of("a", LAYERS[1], BLOCKS, free)
    fitting = int(re.search(r"--num-gpu-blocks-override (\d+), or store='device'", str(error.value))[1])
    assert fitting == 8
    taken = memory.pages_of("a", LAYERS[1], BLOCKS[:fitting], free)
    # what one layer has taken counts for all; vLLM may ask again with another pool
    left = free - ranks * taken.nbytes
    assert memory.pages_of("b", LAYERS[2], BLOCKS[:fitting], left) is not None
    assert memory.pages_of("a", LAYERS[1], BLOCKS[:3], free).shape[0] == 3
    assert memory.pages_of("a", LAYERS[1], BLOCKS[:0], 0) is None


def test_a_container_has_what_its_limit_leaves(tmp_path):
    assert available_bytes(tmp_path / "none") > 2**20
    for name, text in (("memory.stat", "anon 5\ninactive_file 300\n"), ("memory.current", "1000\n")):
        (tmp_path / name).write_text(text)
    for limit, left in (("1500\n", 800), ("max\n", None)):
        (tmp_path / "memory.max").write_text(limit)
        assert (available_bytes(tmp_path) == left) is (left is not None)
