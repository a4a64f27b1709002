"""Fixtures of the tests of graphs."""

import pytest


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that generate captures during the test."""
    from condense.models.replay import ReplayedForward

    found, capture = [], ReplayedForward._capture

    def spy(self, *args):
        found.append(capture(self, *args))
        return found[-1]

    monkeypatch.setattr(ReplayedForward, "_capture", spy)
    return found
