"""Condense a model in place, undo it, or condense it in a ``with`` block; the choice is kept in its configuration."""

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from condense.methods import Method, check_names, layers_as_text, methods_in, settings_of
from condense.models.adapted import warn_of_pooling
from condense.models.attention import IMPLEMENTATION, KEY, CondensedAttention, condensed_class
from condense.models.choice import Layers, MethodChoice, assign, chosen_layers, parse_choice
from condense.models.families import is_supported, sliding_window
from condense.models.forward import ForwardBoard
from condense.models.mla import check_latents
from condense.models.modules import attentions_of, by_layer, condensed_layers
from condense.models.reread import check_readings, watch
from condense.models.stock import method_of, stock_method

logger = logging.getLogger(__name__)
_ENTERING = threading.Lock()
# condensed modules of all models, to find two models that were built from one configuration
_CONDENSED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_SHARED = "config must be the model's own, got that of a condensed model: build one of them from copy.deepcopy(config)"
_NOT_CONDENSED = (
    "the model has attn_implementation='condense', but no layer says how: call model.set_attn_implementation('sdpa') "
    "before condense.apply, or leave attn_implementation out"
)
ModelT = TypeVar("ModelT", bound=nn.Module)


def apply(model: ModelT, method: MethodChoice | str, layers: Layers = None) -> ModelT:
    """Give a Hugging Face causal LM condensed attention, in place, and return it.

    method: one for all layers, or a mapping of layers to methods, such as ``{0: Dense(), "2-3,-1": Recall(), "rest":
    CCA()}``; "rest" are the layers that can be condensed and are not named. With one method and no ``layers``, each
    layer gets what `Method.of_layer` says: with `Recall` the first opens all groups. Also as text: ``"recall-host"``
    (`condense.named`), ``"cca:window=512"``, ``"recall@2,3+cca@rest"``, or ``"@FILE"`` of `condense calibrate`.
    layers: with one method, the layers to condense, as indices or as text; None means all that can be. Negative indices
    count from the last layer. Layers that are not named stay as they are, condensed or stock; so do layers with a
    sliding window. If ``layers`` is None, a warning lists them. Pooling without adaptation is logged, once.
    The choice is written to ``config.condense`` and saved by save_pretrained; the saved model loads condensed with any
    ``attn_implementation`` given to from_pretrained, and `restore` then returns to that one. Transformers without
    `condense` refuse it, unless an ``attn_implementation`` is given. ``model.set_attn_implementation("sdpa")`` switches
    condensing off, ``"condense"`` on again; save_pretrained saves what is on. Apply before accelerate, FSDP and
    torch.compile wrap the model.
    Raises ValueError for an unsupported model, for ``config.output_attentions``, for a configuration shared with
    another condensed model, for a layer that is named twice or cannot be condensed by its method, for a method of one's
    own without a ``name`` or with a list for a setting, for a ``method`` of another form, and for a model that another
    thread has in a `use` block.
    """
    base, attentions = attentions_of(model)
    _check_own(attentions)
    chosen = _chosen(base, attentions, method, layers)
    check_names(chosen.values())
    _assign(base, attentions, condensed_layers(base) | chosen, _owner(attentions))
    warn_of_pooling(base, parse_choice(method))
    if layers is None:
        others = sorted(set(attentions) - set(chosen))
        sliding = [i for i in others if sliding_window(attentions[i]) is not None]
        if sliding:
            logger.warning("layers %s have a sliding window and stay as they are", sliding)
        if len(others) > len(sliding):
            logger.warning("layers %s are not named and stay as they are", [i for i in others if i not in sliding])
    return model


def chosen_methods(model: nn.Module, method: MethodChoice | str) -> dict[int, Method]:
    """Layer index to method for the layers that `apply` would change; raises ValueError as `apply`."""
    return _chosen(*attentions_of(model), method, None)


def _chosen(
    base: PreTrainedModel, attentions: dict[int, nn.Module], method: MethodChoice | str, layers: Layers
) -> dict[int, Method]:
    count = int(base.config.get_text_config(decoder=True).num_hidden_layers)
    choice = parse_choice(method)
    if layers is None:
        chosen = assign(choice, attentions, count)
    elif isinstance(choice, Mapping):
        raise ValueError("layers must be left out where method names them, got both")
    else:
        chosen = dict.fromkeys(chosen_layers(layers, attentions, count), choice)
    check_config(attentions)
    check_latents(chosen, attentions)
    check_readings(attentions, chosen)
    return chosen


def restore(model: ModelT) -> ModelT:
    """The stock model again, bit for bit, in place. A model that is not condensed is returned as it is.

    Raises ValueError as `apply` for the model, and for attention modules that ``fully_shard`` wrapped after `apply`.
    """
    base, attentions = attentions_of(model)
    _check_own(attentions)
    _assign(base, attentions, {}, _owner(attentions))
    return model


@contextmanager
def use(model: ModelT, method: MethodChoice | str, layers: Layers = None) -> Iterator[ModelT]:
    """`apply` for the length of a ``with`` block; afterwards the model is as before. Methods need no ``name`` there.

    In training the block must hold the backward pass too: gradient checkpointing runs layers again there. The block
    changes the model itself and is for the thread that enters it. In every other thread the model's forward, `apply`,
    `restore` and `use` raise ValueError meanwhile; graphs that were compiled do not check. To stream tokens, enter the
    block in the thread that generates.
    """
    base, attentions = attentions_of(model)
    _check_own(attentions)
    with _ENTERING:
        owner, before = _owner(attentions), condensed_layers(base)
        implementation = _config(attentions)._attn_implementation
        _assign(base, attentions, before | _chosen(base, attentions, method, layers), threading.get_ident())
    warn_of_pooling(base, parse_choice(method))
    try:
        yield model
    finally:
        _assign(base, attentions, before, owner)
        _config(attentions)._attn_implementation_internal = implementation


def condense_from_config(model: PreTrainedModel) -> None:
    """Condense a model under construction if its configuration says so (``config.condense``)."""
    config = model.config.get_text_config(decoder=True)
    settings = getattr(config, KEY, None)
    if settings is None:
        return
    attentions = by_layer(m for m in model.modules() if is_supported(m))
    stock = config._attn_implementation
    if stock == IMPLEMENTATION:  # from the saved configuration: the caller asked for no other
        stock = model.get_correct_attn_implementation(None)
    config._attn_implementation_internal = IMPLEMENTATION
    if not attentions:
        return  # an inner model without attention, or one with unknown classes, which raise when they are called
    methods = methods_in(settings)
    # a configuration written by hand may hold named settings; they are spelled out, as other versions may change them
    config.condense = settings | settings_of(methods)
    # a model loaded with fewer layers than it was saved with ignores the methods of the others
    assignment = {i: method for i, method in methods.items() if i in attentions}
    # layers for multi-token prediction (generate's use_mtp) count from 0 again: those not named attend as stock ones
    if methods and not assignment and type(model).__name__ != "MtpModel":
        raise ValueError(
            f"config.condense must name layers that the model has, {layers_as_text(sorted(attentions))}, got "
            f"{layers_as_text(sorted(methods))}: correct it, or remove it and attn_implementation for a stock model"
        )
    check_latents(assignment, attentions)
    _set_methods(model, attentions, assignment, stock, None)


def _owner(attentions: dict[int, nn.Module]) -> int | None:
    """The thread whose `use` block the model is in, None outside of one. Raises ValueError in another thread."""
    board = next((m.condense_board for m in attentions.values() if isinstance(m, CondensedAttention)), None)
    if board is None:
        return None
    board.check_thread()
    return board.owner


def _assign(
    base: PreTrainedModel, attentions: dict[int, nn.Module], assignment: dict[int, Method], owner: int | None
) -> None:
    """Condense the layers in ``assignment``, or make all stock if it is empty, and note it in the configuration.

    The configuration's private field is set: its public setter would change all parts of the model, vision towers too.
    """
    config = _config(attentions)
    if not assignment:
        condensed = [module for module in attentions.values() if isinstance(module, CondensedAttention)]
        if not condensed:
            return
        wrapped = next((type(m).__name__ for m in condensed if type(m).__mro__[1] is not CondensedAttention), None)
        if wrapped is not None:
            raise ValueError(
                f"attention modules got another class, {wrapped}, since they were condensed: call condense.restore "
                "before fully_shard, or leave attention modules to the fully_shard of their decoder layers"
            )
        watch(base, attentions, {})
        for module in condensed:
            previous = module.condense_previous
            module.__class__ = type(module).__mro__[2]  # the stock class: 0 is the condensed subclass, 1 its mixin
            del module.condense_method, module.condense_stock, module.condense_previous, module.condense_board
            _rebind_hooks(module)
        vars(config).pop(KEY, None)  # a caller may have deleted it
        if config._attn_implementation == IMPLEMENTATION:
            config._attn_implementation_internal = previous
        return
    _set_methods(base, attentions, assignment, config._attn_implementation, owner)
    config.condense = settings_of(assignment)
    config._attn_implementation_internal = IMPLEMENTATION


def _check_own(attentions: dict[int, nn.Module]) -> None:
    """Raise ValueError if another condensed model has the same configuration, in which the choice is written."""
    config, others = _config(attentions), set(_CONDENSED) - set(attentions.values())
    if any(isinstance(module, CondensedAttention) and module.config is config for module in others):
        raise ValueError(_SHARED)


def _config(attentions: dict[int, nn.Module]) -> Any:
    """The configuration that the attention modules use: in multimodal models, that of the text part."""
    return next(iter(attentions.values())).config


def _set_methods(
    model: nn.Module, attentions: dict[int, nn.Module], assignment: dict[int, Method], stock: str, owner: int | None
) -> None:
    """Condense the modules; each keeps ``stock``, the name of the implementation that `restore` returns to."""
    watch(model, attentions, assignment)
    _CONDENSED.update(attentions.values())
    for index, module in attentions.items():
        if stock != IMPLEMENTATION:
            module.condense_previous = stock  # type: ignore[assignment]
        if not isinstance(module, CondensedAttention):
            module.__class__ = condensed_class(type(module))
            _rebind_hooks(module)
        module.condense_method = assignment.get(index)  # type: ignore[assignment]
        module.condense_stock = stock_method(module)  # type: ignore[assignment]
    board = ForwardBoard(owner, {index: method_of(module) for index, module in attentions.items()})
    for module in attentions.values():
        module.condense_board = board  # type: ignore[assignment]


def _rebind_hooks(module: nn.Module) -> None:
    """Make accelerate's hooks call the forward of the module's new class; they hold that of the old one."""
    if "_old_forward" in vars(module):
        module._old_forward = type(module).forward.__get__(module)


def check_config(attentions: dict[int, nn.Module]) -> None:
    """Raise ValueError for ``output_attentions``, and for a stock model with the configuration of a condensed one."""
    config = _config(attentions)
    if getattr(config, "output_attentions", False):
        raise ValueError(
            "config.output_attentions must be False, got True: condensed attention has no weights to return"
        )
    is_condensed = any(isinstance(module, CondensedAttention) for module in attentions.values())
    if config._attn_implementation == IMPLEMENTATION and not is_condensed:
        raise ValueError(_SHARED if hasattr(config, KEY) else _NOT_CONDENSED)
