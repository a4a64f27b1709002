"""Adapters (PEFT) trained on a condensed model: their folder names the methods, and loading them condenses the base.

Wrapped are the functions of PEFT and transformers (`load_adapter`) that save, load or swap an adapter, and PEFT's check
of a module that it copies to train the copy: condensed attention must not be copied. Importing PEFT takes long, so it
is wrapped only once somebody else imports it.
"""

import functools
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from condense.methods import check_names, methods_in, settings_of
from condense.models.adapted import ADAPTED
from condense.models.apply import apply, restore
from condense.models.attention import CondensedAttention, is_condensed
from condense.models.choice import described
from condense.models.modules import condensed_layers
from condense.version import __version__

logger = logging.getLogger(__name__)
FILE = "condense.json"
_DEFAULT = "default"
_MODEL, _SWAP = "peft.peft_model", "peft.utils.hotswap"
_WHERE = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of any kind by ``around``, which gets the stock function before the method's arguments."""
    found = inspect.getattr_static(owner, name)
    kind = type(found) if isinstance(found, classmethod | staticmethod) else None
    stock = found.__func__ if kind else found

    @functools.wraps(stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    setattr(owner, name, kind(method) if kind else method)


def install() -> None:
    """Wrap what saves, loads and swaps adapters, PEFT's own modules once they are imported."""
    wrap(PreTrainedModel, "load_adapter", _load)
    for name in (_MODEL, _SWAP):
        if name in sys.modules:
            _wrap(sys.modules[name])
        else:
            sys.meta_path.insert(0, _Finder(name))


def write_record(folder: str | os.PathLike[str], model: nn.Module, names: Iterable[str] = (_DEFAULT,)) -> None:
    """Write the model's methods beside the adapters of these names in a folder, and whether it was adapted to them; for
    a model that is not condensed, remove the file. PEFT writes the default adapter to the folder itself.
    """
    methods = condensed_layers(model)
    record: dict[str, Any] = {}
    if methods and is_condensed(model):
        adapted = getattr(_text_config(model), ADAPTED, None)
        record = settings_of(methods) | {"version": __version__} | ({ADAPTED: adapted} if adapted else {})
    for name in names:
        place = Path(folder) if name == _DEFAULT else Path(folder) / name
        if record and (place / "adapter_config.json").is_file():
            (place / FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        else:
            (place / FILE).unlink(missing_ok=True)


def read_record(model: nn.Module, adapter: Any, where: dict[str, Any]) -> None:
    """Condense a model as the file in an adapter's folder says; without such a file nothing happens.

    adapter: the folder, or a repository of the hub. where: keywords of PEFT that say where to look for it, such as
    ``revision``. Raises ValueError, model unchanged, if the model is condensed in another way, or cannot be condensed.
    """
    if not isinstance(adapter, str | os.PathLike):
        return
    known = {key: where[key] for key in _WHERE if where.get(key) is not None}
    path = cached_file(
        adapter,
        FILE,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **known,
    )
    if path is None:
        return
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    wanted, held = methods_in(record, path), condensed_layers(model)
    if held and held != wanted:
        raise ValueError(
            f"the adapter in {adapter} was trained with {described(wanted)}, the model has {described(held)}: condense "
            "it in the adapter's way (condense serve: --method), or call condense.restore(model) first"
        )
    if not held:
        apply(model, wanted)
        said = described(wanted)
        logger.warning("the adapter in %s was trained with %s: the model is condensed likewise", adapter, said)
    if record.get(ADAPTED) is not None:
        setattr(_text_config(model), ADAPTED, record[ADAPTED])


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _wrap(module: ModuleType) -> None:
    if module.__name__ == _SWAP:
        wrap(module, "hotswap_adapter", _load)
    else:
        wrap(module.PeftModel, "save_pretrained", _save)
        wrap(module.PeftModel, "load_adapter", _load)
        wrap(module.AuxiliaryTrainingWrapper, "check_module", _check_copied)


def _save(stock: Any, self: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    check_names(condensed_layers(self).values())
    result = stock(self, save_directory, *args, **kwargs)
    selected = kwargs.get("selected_adapters", args[1] if len(args) > 1 else None)
    write_record(save_directory, self, selected or cast(Any, self).peft_config)
    return result


def _load(stock: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # this parameter must be called ``model``: callers of PEFT's hotswap_adapter may pass it as a keyword
    names = ("model_id", "peft_model_id", "model_name_or_path")
    adapter = args[0] if args else next((kwargs[name] for name in names if name in kwargs), None)
    held = condensed_layers(model)
    read_record(model, adapter, kwargs | (kwargs.get("adapter_kwargs") or {}))
    try:
        return stock(model, *args, **kwargs)
    except BaseException:
        if not held and condensed_layers(model):
            restore(model)
            vars(_text_config(model)).pop(ADAPTED, None)
        raise


def _check_copied(stock: Any, self: nn.Module) -> None:
    """Run PEFT's check of a module that it copies to train; raise ValueError for condensed attention in that module."""
    stock(self)
    if any(isinstance(module, CondensedAttention) for module in cast(Any, self).original_module.modules()):
        raise ValueError(
            "modules_to_save must not hold condensed attention, which would be in the model twice: name its "
            "projections (such as q_proj), or use LoRA"
        )


class _Finder:
    """An import hook for one module of PEFT: ordinary finders find it; its functions are wrapped once it has run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _wrap(module)

            loader.exec_module = exec_module
        return spec


def refuse_adapter(folder: Path) -> None:
    """Raise ValueError for a folder with an adapter and no model."""
    path = folder / "adapter_config.json"
    if path.is_file() and not (folder / "config.json").exists():
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
        raise ValueError(
            f"model: {folder} is an adapter of {base}: name that model, and in vLLM the adapter with --enable-lora "
            f"--lora-modules NAME={folder} and --method as it was trained with; or merge the two"
        )
