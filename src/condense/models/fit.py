"""Number of requests that fit into a memory under each choice of methods and with dense caches, by arithmetic."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from condense.models.choice import MethodChoice
from condense.models.inspect import inspect, served_layers
from condense.serving.blocks import ServedLayer, blocks_of_request
from condense.serving.host import copied_bytes, host_bytes, slot_rows
from condense.serving.vllm.register import ARCHITECTURES

# share of the device's memory for weights and caches; the rest is for activations
USED = 0.9
# bits per number in transformers' quantised caches: 4, and a step and a zero of 16 bits for 64 numbers
_FOUR_BITS = 4 + 2 * 16 / 64


@dataclass(frozen=True)
class CacheFit:
    """The cache of one request: bytes on the device and in host memory.

    requests: how many fit; None without a limit. served_bytes: device bytes of one request in vLLM's blocks (`condense
    serve`), None if it is not served. served: requests that vLLM runs at once; None if not served or without a limit.
    """

    name: str
    device_bytes: int
    host_bytes: int
    requests: int | None
    served_bytes: int | None = None
    served: int | None = None


def weight_bytes(model: nn.Module, itemsize: int) -> int:
    """Bytes of the model's weights with ``itemsize`` bytes per number; works on the meta device."""
    return sum(parameter.numel() for parameter in model.parameters()) * itemsize


def cache_fits(
    model: nn.Module,
    choices: Mapping[str, MethodChoice],
    length: int,
    itemsize: int = 2,
    *,
    memory: int | None = None,
    host_memory: int | None = None,
    weights: int | None = None,
) -> list[CacheFit]:
    """Caches of one request of ``length`` tokens: dense, dense in 8 and in 4 bits, then under each choice.

    model: stock, also on the meta device. memory, host_memory: bytes for all requests on the device and on the host,
    None if not limited; weights and caches get `USED` of the former, which also has to hold one dense cache where
    prompts are read twice. weights: bytes of the weights, None: `weight_bytes`.
    Raises ValueError as `condense.models.inspect.inspect`.
    """
    weights = weight_bytes(model, itemsize) if weights is None else weights
    room = None if memory is None else int(USED * memory) - weights
    reports = {name: inspect(model, choice, length, itemsize) for name, choice in choices.items()}
    dense = sum(report.dense_bytes for report in next(iter(reports.values())))
    dense_in = {"dense": 8 * itemsize, "dense, FP8": 8, "dense, 4 bits": _FOUR_BITS}
    fits = []
    for name, bits in dense_in.items():
        device_bytes = int(dense * bits / (8 * itemsize))
        fits.append(CacheFit(name, device_bytes, 0, None if room is None else max(0, room // device_bytes)))
    for name, layers in reports.items():
        device_bytes, on_host = sum(layer.bytes for layer in layers), sum(layer.host_bytes for layer in layers)
        # bytes of the dense cache that holds one prompt at a time while it is read twice
        twice = sum(x.dense_bytes for x in layers if x.method is not None and x.method.reread is not None)
        left = None if room is None else room - twice
        limits = (left, device_bytes), (host_memory, on_host)
        counts = [max(0, limit // each) for limit, each in limits if limit is not None and each]
        served = _served(model, choices[name], length, itemsize, (room, host_memory))
        fits.append(CacheFit(name, device_bytes, on_host, min(counts, default=None), *served))
    return fits


def _served(
    model: nn.Module, choice: MethodChoice, length: int, itemsize: int, rooms: tuple[int | None, int | None]
) -> tuple[int | None, int | None]:
    """Bytes of a request of ``length`` tokens in vLLM, and how many requests fit into ``rooms``, bytes on the device
    and in host memory; None as in `CacheFit`.
    """
    layers: list[ServedLayer] = []
    if type(model).__name__ in ARCHITECTURES:
        with suppress(ValueError):
            layers = served_layers(model, choice, length, itemsize)
    if not any(layer.plan for layer in layers):
        return None, None
    one = blocks_of_request(layers, length)
    room, on_host = rooms
    if room is not None:
        room -= slot_rows(layers, length, room) * copied_bytes(layers)
    limits = (room, one.block_bytes), (on_host, host_bytes(layers))
    blocks = [max(0, limit) // each for limit, each in limits if limit is not None and each]
    # vLLM gives one block to no request
    return one.total_bytes + copied_bytes(layers), max(0, min(blocks) - 1) // one.blocks if blocks else None
