"""The methods that a step trains: of several by layer those that training can change, in groups that grow."""

from collections.abc import Mapping

from condense.methods import Dense, Method
from condense.models.choice import MethodChoice, described, methods_of


def trained(choice: MethodChoice) -> MethodChoice:
    """The methods trained for a choice: of several by layer, those without gradients become dense attention.

    `Recall` as it is served has none. It keeps every token, so a model that is dense there learns to read the other
    layers. Raises ValueError if that leaves dense attention alone.
    """
    if isinstance(choice, Method):
        choice.check_gradients()
        return choice
    full = {layers: method if _has_gradients(method) else Dense() for layers, method in choice.items()}
    if full != choice and all(isinstance(method, Dense) for method in full.values()):
        raise ValueError(
            f"method: wanted a layer whose method gives gradients, got {described(choice)}; it needs no training"
        )
    return full


def left_dense(methods: Mapping[int, Method]) -> list[int]:
    """The layers that are trained with dense attention in place of their own methods."""
    return [layer for layer in sorted(methods) if not _has_gradients(methods[layer])]


def largest_group(choice: MethodChoice) -> int:
    """Tokens of the largest group of a choice's methods; 0 if none has groups."""
    return max(getattr(method, "group_size", None) or 0 for method in methods_of(choice))


def grown(choice: MethodChoice, size: int) -> MethodChoice:
    """The same choice with groups of at most so many tokens."""

    def cut(method: Method) -> Method:
        return method.replace(group_size=size) if largest_group(method) > size else method

    return cut(choice) if isinstance(choice, Method) else {layers: cut(m) for layers, m in choice.items()}


def _has_gradients(method: Method) -> bool:
    try:
        method.check_gradients()
    except ValueError:
        return False
    return True
