"""Shared by all tests. Its place makes `oracle` importable."""

import pytest

from condense.ops import torch_blocks


@pytest.fixture(params=["reference", "torch", "torch-blocks"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each backend, and the torch backend with blocks so small that short sequences take many."""
    if request.param == "torch-blocks":
        monkeypatch.setattr(torch_blocks, "_MAX_BLOCK", 6)
    return request.param.removesuffix("-blocks")
