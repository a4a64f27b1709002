"""The choice of a method for each layer: one method, a mapping of layers, or text; resolved for a model's layers.

Layers are named by an index, by several (a range, a tuple), by text (``"0-3,7"``) or by ``"rest"``: all layers that can
be condensed and that no other key names. Negative indices count from the last layer.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from condense.methods import Method, layers_as_text, methods_in
from condense.models.families import is_latent, sliding_window

# one method for all layers, or layers -> method; layers that are left out stay as they are
MethodChoice = Method | Mapping[Any, Method]
# layers by index or as text, None for all that can be condensed
Layers = Iterable[int] | str | None

REST = "rest"
_RANGE = re.compile(r"\s*(-?\d+)\s*(?:-\s*(-?\d+)\s*)?", re.ASCII)


def parse_choice(choice: object) -> MethodChoice:
    """Parse a choice: a method, a mapping, text (`choice_from_text`) or a method's `to_dict` form.

    Raises ValueError for anything else, and for methods whose settings cannot be hashed.
    """
    if isinstance(choice, str):
        return choice_from_text(choice)
    if isinstance(choice, Mapping) and not choice:
        raise ValueError("method must name at least one layer, got an empty mapping")
    by_layer = isinstance(choice, Mapping) and "method" not in choice
    given: Mapping[Any, Any] = choice if isinstance(choice, Mapping) and by_layer else {REST: choice}
    parsed = {layers: Method.parse(method) for layers, method in given.items()}
    try:
        set(parsed.values())
    except TypeError as error:
        raise ValueError(f"method must have hashable settings, tuples in place of lists, got {choice}") from error
    return parsed if by_layer else parsed[REST]


def choice_from_text(*texts: str) -> MethodChoice:
    """A choice as on the command line: ``cca:window=512``, ``recall@2,3+cca@rest``, or ``@FILE`` of an allocation.

    texts: one, or several that each name their layers. Raises ValueError for anything else.
    """
    if any(text.startswith("@") for text in texts):
        if len(texts) > 1:
            raise ValueError(f"method: a file says what all layers get and stands alone, got {' '.join(texts)}")
        return _read_choice(Path(texts[0][1:]).expanduser())
    parts = [part for text in texts for part in text.split("+")]
    choice: dict[str, Method] = {}
    for part in parts:
        method, at, layers = part.partition("@")
        if not at and len(parts) == 1:
            return Method.parse(method)
        if not at:
            raise ValueError(
                f"method: each of several must name its layers, got {part!r}; write {part}@rest, or {part}@0-3"
            )
        layers = layers.strip()
        if layers != REST:
            parse_layers(layers)
        if layers in choice:
            raise ValueError(f"method: layers {layers} are named twice, for {choice[layers]} and {part}")
        choice[layers] = Method.parse(method)
    return choice


def _read_choice(path: Path) -> dict[int, Method]:
    """The choice in a JSON file, such as an allocation, in the form of `condense.methods.settings_of`."""
    if not path.is_file():
        raise ValueError(f"method: no such file: {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"method: wanted JSON, got {path}: {error}") from error
    return methods_in(content, str(path))


def parse_layers(text: str) -> list[tuple[int, int]]:
    """The first and last layer of each part of text such as ``0,4-7`` or ``-2``.

    Raises ValueError for anything else.
    """
    ranges = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"layers must look like 2-31 or 0,4-7, got {text!r}")
        first = int(found[1])
        ranges.append((first, first if found[2] is None else int(found[2])))
    return ranges


def assign(choice: MethodChoice, attentions: Mapping[int, nn.Module], count: int) -> dict[int, Method]:
    """Layer index to method, for the layers that a choice names.

    One method stands for all layers that can be condensed: each gets its `Method.of_layer`.
    attentions: the attention modules by layer. count: number of the model's layers. Raises ValueError for layers that
    are named twice, do not exist or cannot be condensed.
    """
    if not isinstance(choice, Mapping):
        layers = chosen_layers(None, attentions, count)
        return {i: choice.of_layer(is_first=i == layers[0], has_latents=is_latent(attentions[i])) for i in layers}
    chosen: dict[int, Method] = {}
    for layers, method in choice.items():
        if layers == REST:
            continue
        if layers is None:
            raise ValueError("layers must be named by an index, by several or as text, got None")
        for index in chosen_layers([layers] if type(layers) is int else layers, attentions, count):
            if index in chosen:
                raise ValueError(f"method: layer {index} is named twice, for {chosen[index]} and {method}")
            chosen[index] = method
    if REST in choice:
        chosen |= {i: choice[REST] for i in chosen_layers(None, attentions, count) if i not in chosen}
    return chosen


def chosen_layers(layers: Layers, attentions: Mapping[int, nn.Module], count: int) -> list[int]:
    """The layers as a list of indices from 0; None: all that can be condensed. Other arguments as in `assign`.

    Raises ValueError for indices that do not exist, for an empty list, and for layers that cannot be condensed.
    """
    full = [i for i, module in sorted(attentions.items()) if sliding_window(module) is None]
    if layers is None:
        if not full:
            raise ValueError(
                "model has sliding windows in all layers, which bound its cache: nothing is left to condense"
            )
        return full
    if not isinstance(layers, Iterable):
        raise ValueError(f"layers must be a list of layer indices, got {layers!r}")
    chosen = []
    for given in _indices(layers, count) if isinstance(layers, str) else layers:
        is_index = isinstance(given, int) and not isinstance(given, bool)
        index = given + count if is_index and given < 0 else given
        if not is_index or not 0 <= index < count:
            raise ValueError(f"layers must be indices from 0 to {count - 1}, got {given!r}")
        if index not in attentions:
            raise ValueError(f"layers: layer {index} has no attention that can be condensed; full are {full}")
        if index not in full:
            raise ValueError(f"layers: layer {index} has a sliding window and cannot be condensed; full are {full}")
        chosen.append(index)
    if not chosen:
        raise ValueError("layers must name at least one layer, got none; leave it out to condense all")
    return chosen


def _indices(text: str, count: int) -> list[int]:
    """The layers that text names, as indices from 0; if one does not exist, that index alone, as it was written.

    Raises ValueError as `parse_layers`, and for a range with its higher end first.
    """
    indices: list[int] = []
    for first, last in parse_layers(text):
        low, high = (i + count if i < 0 else i for i in (first, last))
        outside = [i for i, index in ((first, low), (last, high)) if not 0 <= index < count]
        if outside:
            return outside[:1]  # the caller refuses this index; a range up to it could fill the memory
        if low > high:
            raise ValueError(f"layers: a range must go from its lower to its higher end, got '{first}-{last}'")
        indices += range(low, high + 1)
    return indices


def methods_of(choice: MethodChoice) -> list[Method]:
    """The methods of a choice, each once."""
    return list(dict.fromkeys(choice.values())) if isinstance(choice, Mapping) else [choice]


def as_steps(choice: MethodChoice) -> MethodChoice:
    """The same choice with each method replaced by its `Method.as_steps`."""
    if isinstance(choice, Mapping):
        return {layers: method.as_steps for layers, method in choice.items()}
    return choice.as_steps


def described(choice: MethodChoice) -> str:
    """A method, or the methods of a choice with their layers, in words."""
    if not isinstance(choice, Mapping):
        return str(choice)
    keys = {method: [key for key in choice if choice[key] == method] for method in methods_of(choice)}
    return "; ".join(f"{method} in layers {layers_as_text(of)}" for method, of in keys.items())
