"""The condensed model of a case of `tiny`, for tests that are parametrized by it."""

import pytest
from models import tiny


@pytest.fixture
def model(request):
    return tiny.condensed(*request.param)
