"""Running a training configuration: phase after phase, resumable, its output folder complete or absent."""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import is_tensorboard_available
from transformers.trainer_utils import set_seed

from condense.files import sole_writer, whole_folder
from condense.methods import check_names, check_trainable, settings_of
from condense.models import attention_layers, chosen_methods, condensed_layers, methods_of, restore, use
from condense.models.adapted import ADAPTED
from condense.models.adapters import refuse_adapter
from condense.models.families import check_learned_positions
from condense.results import refuse_existing, write_results
from condense.tasks import FORMS, Corpus, SequenceBuilder, load_corpus, load_words, read_documents
from condense.tasks.corpus import check_vocabulary, sha256
from condense.tasks.documents import form_of
from condense.train.config import PhaseConfig, TrainConfig
from condense.train.data import TrainingSequences, mixes_documents
from condense.train.growth import trained
from condense.train.optimizer import set_trained
from condense.train.phase import newest_checkpoint, train_phase
from condense.train.record import check_same_run, summary
from condense.train.tokenizer import train_tokenizer

REPORT = "training.json"
_RUNS = "runs"  # TensorBoard's files, by the name that transformers gives their folder


def prepare(config: TrainConfig) -> tuple[PreTrainedTokenizerBase, list[Corpus]]:
    """Train (or load) the tokenizer and encode the data; all runs on the same data can share ``config.cache_folder``.

    Returns the tokenizer, and a corpus of all data files, or one for each of them if they are weighted.
    Raises ValueError for a missing or empty data file, and a tokenizer with tokens that the pretrained model lacks.
    """
    known = None
    if config.pretrained is not None:
        tokenizer = AutoTokenizer.from_pretrained(config.pretrained)
        of_model = AutoConfig.from_pretrained(config.pretrained)
        check_vocabulary("pretrained", tokenizer, of_model)
        known = of_model.get_text_config(decoder=True).vocab_size
    else:
        tokenizer = _own_tokenizer(config)
    sources = [[path] for path in config.data] if config.data_weights else [config.data]
    corpora = [load_corpus(paths, tokenizer, config.cache_folder) for paths in sources]
    if known is not None and (largest := max(int(corpus.tokens.max()) for corpus in corpora)) >= known:
        # added tokens that no text has may lack an embedding
        raise ValueError(
            f"data: wanted text of the model's {known} tokens, got {tokenizer.convert_ids_to_tokens(largest)!r} "
            f"({largest}): leave it out, or give a model that has it"
        )
    return tokenizer, corpora


def new_model(architecture: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, dtype: str) -> PreTrainedModel:
    """A causal LM with random weights.

    architecture: the arguments of ``AutoConfig.for_model``. tokenizer: whose special tokens the model gets. dtype: of
    the weights, ``"float32"`` or ``"bfloat16"``; drawn in float32.
    """
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings = AutoConfig.for_model(**architecture, **special)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    # Casts parameters only: model.to(dtype) would also round the frequencies of rotary embeddings.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    return model


def run_training(config: TrainConfig, *, resume: bool = False) -> Path:
    """Train all phases, write model, tokenizer and ``training.json`` to ``config.output``, and return that folder.

    Unfinished work lives in ``config.work``: each phase's checkpoints, and its model once it is done. The
    output folder appears under its name only when everything in it is written.

    resume: go on with what an interrupted run of the same configuration left in ``config.work``.
    Raises ValueError for an output that exists, or that another process writes; for unfinished work without ``resume``,
    or of another run; for bad data; for a model that is too short for a phase, and a method that cannot condense it or
    be trained.
    """
    processes = PartialState(cpu=not torch.accelerator.is_available())
    with sole_writer(config.output) if processes.is_main_process else contextlib.nullcontext():
        return _run(config, processes, resume)


def _run(config: TrainConfig, processes: PartialState, resume: bool) -> Path:
    if processes.is_main_process:
        if resume and config.output.exists():
            # a finished run gives the output its name, and then removes its work
            left = f"a finished one, which only lacks the removal of {config.work}: delete that folder"
            raise ValueError(
                f"resume: wanted an unfinished run in {config.work}, got "
                f"{left if config.work.exists() else 'none'}, and {config.output} is there already; to start another "
                "run, choose another output"
            )
        refuse_existing(config.output, "output")
        if config.work.exists() and not resume:
            raise ValueError(
                f"resume: wanted True, since an unfinished run lies in {config.work}, got False; to start another run, "
                "delete that folder or choose another output"
            )
    if config.report_to == "tensorboard" and not is_tensorboard_available():
        raise ValueError("report_to: wanted TensorBoard installed for 'tensorboard', got none: pip install tensorboard")
    _check_model(config)
    begun = config.work.exists()
    processes.wait_for_everyone()
    try:
        with processes.main_process_first():  # the first process writes record and encoded text, the others read them
            check_same_run(config)
            tokenizer, corpora = prepare(config)
        processes.wait_for_everyone()  # a process that is behind would write the record again after its removal
        builders = []
        for phase in config.phases:
            phase.part_size(processes.num_processes)
            builders.append(_builders(tokenizer, corpora, phase))
        start: Path | None = None
        reports = []
        for index, phase in enumerate(config.phases):
            folder = config.work / f"{index}-{phase.name}"
            if not (folder / "model").exists():
                _run_phase(config, index, tokenizer, builders[index], start, folder)
            start = folder / "model"
            reports.append(folder / REPORT)
    except BaseException:
        # before the first step there is no folder of a phase: leave none to be resumed or deleted
        if not begun and processes.is_main_process and not any(config.work.glob("0-*")):
            shutil.rmtree(config.work, ignore_errors=True)
        raise
    assert start is not None
    if processes.is_main_process:
        _finish(config, start, reports)
    processes.wait_for_everyone()
    return config.output


def _run_phase(
    config: TrainConfig, index: int, tokenizer: PreTrainedTokenizerBase, builders: list[SequenceBuilder],
    start: Path | None, folder: Path,
) -> None:  # fmt: skip
    """Train one phase from ``start`` (``None``: from the configuration's own start) into ``folder/model``."""
    phase, seed, processes = config.phases[index], config.seed, PartialState()
    set_seed(seed)
    saved = start or config.pretrained
    if saved is not None:
        # an adapter is saved with this name of its base, which must be found from any folder
        saved = Path(saved).absolute() if Path(saved).is_dir() else saved
        try:
            stock = AutoModelForCausalLM.from_pretrained(saved, dtype=getattr(torch, config.dtype))
        except Exception as error:  # a truncated file raises an error of its format
            raise ValueError(f"pretrained: wanted weights that can be read, got {saved}: {error}") from error
        # also if it was saved condensed: phases decide which steps are condensed
        stock = restore(stock) if condensed_layers(stock) else stock
    else:
        assert config.architecture is not None
        stock = new_model(config.architecture, tokenizer, config.dtype)
    model: Any = set_trained(stock, config)
    dataset = TrainingSequences(builders, phase, (seed, index), config.data_weights)
    with processes.main_process_first():  # the first process removes half-written checkpoints
        checkpoint = newest_checkpoint(folder)
    began = time.monotonic()
    # sequences depend on the seed alone, so fewer workers change nothing
    workers = min(config.workers, os.cpu_count() or 1)
    trainer = train_phase(
        model, dataset, phase, folder, seed=seed, workers=workers, checkpoint=checkpoint, report_to=config.report_to
    )
    report = {
        "phase": phase,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": phase.tokens,
        "seconds": round(time.monotonic() - began, 1),
        "resumed_from": checkpoint.name if checkpoint else None,
        "history": trainer.state.log_history,
    }
    # gathered from all processes, of which the first writes
    spread = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if spread else None
    if processes.is_main_process:
        write_results(folder / REPORT, report, seed=seed, overwrite=True)
        if phase.method is not None and phase.mix != "dense":
            attention: Any = next(iter(attention_layers(model).values()))
            setattr(attention.config, ADAPTED, settings_of(chosen_methods(model, phase.method)))
        condensed = config.save_condensed and phase is config.phases[-1]
        with whole_folder(folder / "model") as path:
            with use(model, phase.method) if condensed and phase.method is not None else contextlib.nullcontext():
                model.save_pretrained(path, max_shard_size=config.shard_size, state_dict=weights)
            tokenizer.save_pretrained(path)
        for leftover in folder.glob("checkpoint-*"):
            shutil.rmtree(leftover)
    processes.wait_for_everyone()


def _builders(tokenizer: PreTrainedTokenizerBase, corpora: list[Corpus], phase: PhaseConfig) -> list[SequenceBuilder]:
    """A builder of sequences for each corpus. Raises ValueError for too short a corpus, for too few names for hidden
    numbers, and if the least number of them does not fit.
    """
    words = load_words().trained
    most = len(words) // 2
    if phase.task_share and phase.keys[1] > most:
        raise ValueError(f"keys: wanted at most {most}, as names are pairs of {len(words)} words, got {phase.keys}")
    made = [SequenceBuilder(tokenizer, corpus, words, phase.sequence_length) for corpus in corpora]
    fitting = len(made[0].passkeys(np.random.default_rng(0), phase.keys[0], FORMS[0]).keys) if phase.task_share else 0
    if phase.task_share and fitting < phase.keys[0]:
        raise ValueError(
            f"keys: wanted as many as fit into {phase.sequence_length} tokens with their questions, some {fitting}, "
            f"got {phase.keys}"
        )
    return made


def _check_model(config: TrainConfig) -> None:
    """Raise ValueError, before any training, for a model or method that would fail later. Reads no weights."""
    if config.pretrained is not None:
        refuse_adapter(Path(config.pretrained))
        settings = AutoConfig.from_pretrained(config.pretrained)
    else:
        assert config.architecture is not None
        settings = AutoConfig.for_model(**config.architecture)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(settings)
    held = condensed_layers(skeleton)
    for phase in config.phases:
        if phase.method is not None:
            with use(restore(skeleton), phase.method):
                is_saved = config.save_condensed and phase is config.phases[-1]
                if is_saved:
                    check_names(chosen_methods(skeleton, phase.method).values())
                if held and config.train == "lora" and is_saved and condensed_layers(skeleton) != held:
                    raise ValueError(
                        "pretrained: wanted a base that is stock or condensed by the adapter's method, as both are "
                        f"loaded together, got another method in {config.pretrained}: save it after condense.restore"
                    )
            if phase.mix != "dense":
                for method in methods_of(trained(phase.method)):
                    check_trainable(method)
        if phase.packed and (mixes := mixes_documents(settings)) is not None:
            raise ValueError(
                f"packed: wanted a model that keeps documents apart, got {settings.model_type}, {mixes}; leave packed "
                "out"
            )
        check_learned_positions(settings, "sequence_length", phase.sequence_length)


def _own_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    assert config.architecture is not None
    vocab_size = config.architecture["vocab_size"]
    digest = hashlib.sha256("".join(form_of(path) + sha256(path) for path in config.data).encode())
    folder = config.cache_folder / f"tokenizer-{vocab_size}-{digest.hexdigest()[:16]}"
    if not folder.exists():
        documents = read_documents(config.data, skipped=[])  # encoding reports the skipped records
        trained = train_tokenizer(documents, vocab_size, config.architecture["max_position_embeddings"])
        with whole_folder(folder) as part:
            trained.save_pretrained(part)
    # loaded from the folder even if it is new, so that first and later runs use the same
    return AutoTokenizer.from_pretrained(folder)


def _finish(config: TrainConfig, model: Path, reports: list[Path]) -> None:
    """Write the output folder from the last phase's model, then drop the unfinished work."""
    with whole_folder(config.output) as folder:
        shutil.copytree(model, folder, dirs_exist_ok=True)
        phases = [json.loads(report.read_text())["results"] for report in reports]
        for phase, report in zip(config.phases, reports, strict=True):
            if (events := report.with_name(_RUNS)).exists():
                shutil.copytree(events, folder / _RUNS / phase.name)
        write_results(folder / REPORT, {**summary(config), "phases": phases}, seed=config.seed)
    shutil.rmtree(config.work)
