"""The condensed model of a case of `tiny`, for tests that are parametrized by it."""

import pytest
from models import tiny

import condense


@pytest.fixture
def model(request):
    name, choice = request.param
    return condense.apply(tiny.model(name), choice)
