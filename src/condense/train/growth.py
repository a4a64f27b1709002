"""The methods that a step trains: of several by layer those that training can change, in groups that grow."""

from collections.abc import Callable, Mapping

from condense.methods import Dense, Method
from condense.models.choice import MethodChoice, methods_of


def trained(choice: MethodChoice) -> MethodChoice:
    """The methods trained for a choice: of several by layer, those without gradients become dense attention.

    `Recall` as it is served has none. It keeps every token, so a model that is dense there learns to read the other
    layers. Raises ValueError if no method has gradients.
    """
    if any(map(_has_gradients, methods_of(choice))):
        return _each(choice, lambda method: method if _has_gradients(method) else Dense())
    methods_of(choice)[0].check_gradients()
    raise AssertionError("a method without gradients says why")


def left_dense(methods: Mapping[int, Method]) -> list[int]:
    """The layers that are trained with dense attention in place of their own methods."""
    return [layer for layer in sorted(methods) if not _has_gradients(methods[layer])]


def largest_group(choice: MethodChoice) -> int:
    """Tokens of the largest group of a choice's methods; 0 if none has groups."""
    return max(getattr(method, "group_size", 0) for method in methods_of(choice))


def grown(choice: MethodChoice, size: int) -> MethodChoice:
    """The same choice with groups of at most so many tokens."""

    def smaller(method: Method) -> Method:
        own = getattr(method, "group_size", 0)
        return method.replace(group_size=size) if own > size else method

    return _each(choice, smaller)


def _each(choice: MethodChoice, change: Callable[[Method], Method]) -> MethodChoice:
    return change(choice) if isinstance(choice, Method) else {layers: change(m) for layers, m in choice.items()}


def _has_gradients(method: Method) -> bool:
    try:
        method.check_gradients()
    except ValueError:
        return False
    return True
