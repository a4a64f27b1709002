"""Models that commands find and read, with or without weights, and what to say of them. Imports that load torch are
inside of functions, as in `condense.cli.options`.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from condense.cli.options import parse_device, parse_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from condense.models import MethodChoice

T = TypeVar("T")


def saved_choice(model: PreTrainedModel) -> MethodChoice | None:
    """The choice a model was saved with: one method if all layers have the same; None if it is stock."""
    from condense.models import attention_layers, condensed_layers

    saved = condensed_layers(model)
    if not saved:
        return None
    methods = set(saved.values())
    return methods.pop() if len(methods) == 1 and len(saved) == len(attention_layers(model)) else saved


def load_model(
    model: str | None, dtype: str | None, device: str | None, device_map: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, MethodChoice | None]:
    """The bundled model, or the one in a local folder or on the hub, in evaluation mode on its device, with stock
    attention; its tokenizer; and `saved_choice`.

    Raises ValueError for an unknown dtype or device, for device and device_map together, without accelerate for the
    latter, and for a model that cannot be found or read, or has no embeddings for its tokenizer.
    """
    from transformers import AutoModelForCausalLM, logging
    from transformers.utils import is_accelerate_available

    from condense import demo
    from condense.models import restore
    from condense.tasks.corpus import check_vocabulary

    if device_map is not None and device is not None:
        raise ValueError("give --device or --device-map, not both")
    if device_map is not None and not is_accelerate_available():
        raise ValueError("--device-map needs the package accelerate: pip install accelerate")
    chosen = parse_device(device)
    torch_dtype = parse_dtype(dtype, chosen)
    if model is not None and sys.stderr.isatty():
        logging.enable_progress_bar()  # of downloads and of weights, which may take minutes
    source = str(demo.FOLDER) if model is None else model
    settings: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    tokenizer = read_tokenizer(source, settings)
    settings |= {"dtype": torch_dtype} if device_map is None else {"dtype": torch_dtype, "device_map": device_map}
    loaded = read_saved(source, lambda name: AutoModelForCausalLM.from_pretrained(name, **settings))
    saved = saved_choice(loaded)
    stock = restore(loaded if device_map is not None else loaded.to(chosen)).eval()
    check_vocabulary("model", tokenizer, stock.config)
    return stock, tokenizer, saved


def read_tokenizer(model: str, settings: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or on the hub. Raises ValueError as `read_saved`, and for a folder without one."""
    from transformers import AutoTokenizer

    try:
        return read_saved(model, lambda name: AutoTokenizer.from_pretrained(name, **settings))
    except ValueError as error:
        folder = Path(model).expanduser()
        files = [file.name for file in folder.glob("*")]
        if not folder.is_dir() or any(part in name for name in files for part in ("token", "vocab", ".model")):
            raise
        if not {"config.json", "adapter_config.json"} & {*files}:
            raise ValueError(f"model: no model in {model}, which has no config.json") from error
        raise ValueError(f"model: no tokenizer in {model}: tokenizer.save_pretrained({model!r}) adds it") from error


def read_saved(model: str, read: Callable[[str], T]) -> T:
    """``read`` on a folder or hub name. Raises ValueError for any error while finding and reading the files."""
    is_folder = Path(model).expanduser().is_dir()
    if model.startswith((".", "/", "~")) and not is_folder:
        raise ValueError(f"model: no such folder: {model}")
    try:
        if not is_folder:
            _ask_hub(model)
        return read(str(Path(model).expanduser()) if model.startswith("~") else model)
    except Exception as error:
        reason = textwrap.shorten(str(error), width=400, placeholder=" ...") or type(error).__name__
        missing = "" if is_folder else " as no folder of this name is here, from the hub"
        raise ValueError(f"model: cannot read {model}{missing}: {reason}") from error


def _ask_hub(model: str) -> None:
    """Ask a hub once for a model that is not in its cache: transformers asks for a minute if there is no network."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    file = "config.json"  # an adapter's repository may lack it
    if not isinstance(try_to_load_from_cache(model, file), str):
        with suppress(EntryNotFoundError):
            get_hf_file_metadata(hf_hub_url(model, file))


def read_skeleton(model: str | None, shape: str | None = None) -> PreTrainedModel:
    """The bundled model, the one in a folder or on the hub, or one of a known shape, without weights.

    Raises ValueError as `read_saved`, for a folder that holds an adapter alone, and for an unknown shape.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from condense import demo
    from condense.models.adapters import refuse_adapter
    from condense.models.shapes import shape_config

    with torch.device("meta"):
        if shape is not None:
            return AutoModelForCausalLM.from_config(shape_config(shape)).eval()
        source = str(demo.FOLDER) if model is None else model
        refuse_adapter(Path(source).expanduser())
        config = read_saved(source, AutoConfig.from_pretrained)
        return read_saved(source, lambda _: AutoModelForCausalLM.from_config(config).eval())


def warn_of_length(model: PreTrainedModel, length: int) -> None:
    """Say on stderr if ``length`` tokens are more than the model was made for."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and length > limit:
        print(f"condense: {length} tokens are more than the {limit} the model was made for", file=sys.stderr)


def warn_of_defaults(model: PreTrainedModel, choices: Iterable[MethodChoice], saved: MethodChoice | None) -> None:
    """Say on stderr which CCA or LCA has its defaults although the model was adapted to other settings.

    saved: the choice that the model was saved with, which counts where its configuration does not say more.
    """
    from condense.methods import methods_in
    from condense.methods.grouped import GroupPooling
    from condense.models import described, methods_of
    from condense.models.adapted import ADAPTED

    mark = getattr(model.config.get_text_config(decoder=True), ADAPTED, None)
    learned = methods_in(mark, f"config.{ADAPTED}") if mark else saved
    known = [] if learned is None else methods_of(learned)
    if learned is None or not any(isinstance(method, GroupPooling) for method in known):
        return
    for method in dict.fromkeys(method for choice in choices for method in methods_of(choice)):
        if isinstance(method, GroupPooling) and method == type(method)() and method not in known:
            print(f"condense: {method} is the default; the model was adapted to {described(learned)}", file=sys.stderr)
