"""Replacing a method of another library by one that calls it."""

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace the method ``name`` of a class by ``around``, which gets the stock one before the method's arguments."""
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    setattr(owner, name, method)
