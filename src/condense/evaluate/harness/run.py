"""`condense eval`: lm-evaluation-harness runs the tasks, once per method, and every answer is kept as it comes.

The folder of a run holds ``env.json`` (what was run, on what), ``responses/`` (one database per method: the model's
answers, by which an interrupted run goes on), and at the end ``predictions.jsonl`` and ``metrics.json``.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from condense.evaluate.compare import attention_of
from condense.evaluate.harness.tasks import load_tasks
from condense.files import sole_writer, whole_file
from condense.models import MethodChoice, in_eval_mode, methods_of
from condense.models.stock import reads_otherwise
from condense.results import fingerprint, plain, provenance, write_results

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The settings of a run, which are the same for every method.

    tasks: names of the harness's tasks, groups and tags, and of our own. lengths: numbers of tokens, for tasks that
    make documents of several lengths; empty: the tasks' own. limit: number of documents of each task, the first ones;
    None: all. num_fewshot: None: each task's own number. max_length: tokens that the model may read, None: as its
    configuration says. chat: prompts are put into the tokenizer's chat template. data: folder of local files.
    run_generated_code: allow tasks that run the model's programs. trust_remote_code: and code of the tokenizer.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    limit: int | None = None
    num_fewshot: int | None = None
    max_length: int | None = None
    chat: bool = False
    data: Path | None = None
    run_generated_code: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Score:
    """One figure of one task or group under one method.

    metric: name and filter as the harness gives them. by: the value of a field that the documents were split by, empty
    for all documents. stderr: the harness's standard error, None where it has none. n: number of documents.
    """

    method: str
    task: str
    metric: str
    by: dict[str, Any]
    value: float
    stderr: float | None
    n: int


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Mapping[str, MethodChoice],
    settings: Settings,
    output: Path,
    *,
    batch_size: int = 1,
    resume: bool = False,
    on_method: Callable[[str], None] = lambda label: None,
) -> list[Score]:
    """Run the tasks under every method and write the run's folder; on_method is called before each.

    model: a causal LM with stock attention, which it has afterwards too. methods: method by the name that its results
    get. output: a new folder, or with ``resume`` that of the same run, whose missing answers alone are computed.
    Raises ValueError as `load_tasks`, for a tokenizer without a chat template if one is wanted, for a method that the
    model cannot take, for a folder that exists, belongs to another run or is written by one, and for a batch of methods
    that read a prompt at once; torch.OutOfMemoryError if a batch does not fit.
    """
    if settings.chat and tokenizer.chat_template is None:
        raise ValueError(
            f"chat: wanted a tokenizer with a chat template, got that of {tokenizer.name_or_path}: leave it out"
        )
    for label, choice in methods.items():
        check_choice(label, choice, batch_size)
        with attention_of(model, choice):  # fail now if the model cannot take a method, not after hours of others
            pass
    source = {"settings": plain(settings), "methods": plain(methods), "model": fingerprint(model)}
    # paths are made absolute, because tasks are loaded with the data folder as the current one
    folder, name = settings.data and settings.data.absolute(), Path(tokenizer.name_or_path)
    metadata = {"tokenizer": str(name.absolute()) if name.is_dir() else tokenizer.name_or_path}
    metadata |= {"max_seq_lengths": list(settings.lengths)} if settings.lengths else {}
    metadata |= {"data": str(folder)} if folder else {}
    metadata["trust_remote_code"] = settings.trust_remote_code
    manager, tasks = load_tasks(settings.tasks, metadata, data=folder, run_generated_code=settings.run_generated_code)
    scores: list[Score] = []
    lines: list[dict[str, Any]] = []
    with sole_writer(output), in_eval_mode(model):
        _open(output, source, resume=resume)
        for number, (label, choice) in enumerate(methods.items()):
            on_method(label)
            with attention_of(model, choice):
                responses = output / "responses" / str(number)
                results = _run(model, tokenizer, tasks, manager, settings, batch_size, responses)
            scores.extend(_scores(label, results))
            lines.extend(_line(label, task, each) for task, found in results["samples"].items() for each in found)
        with whole_file(output / "predictions.jsonl", overwrite=True) as file:
            file.writelines(json.dumps(plain(line), ensure_ascii=False).encode() + b"\n" for line in lines)
        write_results(output / "metrics.json", {"run": source, "scores": scores}, device=model.device)
    return scores


def check_choice(label: str, choice: MethodChoice, batch_size: int | str) -> None:
    """Warn of a method that reads prompts in another way than single tokens. Raises ValueError for batches under one
    that reads a whole prompt at once; batch_size: as the harness takes it.
    """
    if batch_size not in (1, "1") and any(each.layout.lookahead is not None for each in methods_of(choice)):
        raise ValueError(
            f"batch size must be 1 for {label}, which reads whole prompts at once, padding behind them too, "
            f"got {batch_size}"
        )
    if reads_otherwise(methods_of(choice)) is not None:
        drops = any(method.reread is not None for method in methods_of(choice))
        _log.warning(
            "%s reads prompts otherwise than single tokens: tasks scored by likelihoods do not show what its steps "
            "lose%s", label, ", nor what it drops" if drops else ", prompt='recall' does",
        )  # fmt: skip


def _open(output: Path, source: dict[str, Any], *, resume: bool) -> None:
    """Make the folder with its ``env.json``, or check that an existing one belongs to this run."""
    path = output / "env.json"
    if not resume:
        if output.exists():
            raise ValueError(f"output: wanted a folder that does not exist yet, got {output}; --resume goes on with it")
        import lm_eval

        versions = {"lm_eval": lm_eval.__version__}
        with whole_file(path, overwrite=False) as file:
            file.write(json.dumps(provenance() | versions | {"run": source}, indent=2).encode() + b"\n")
        return
    if not path.is_file():
        raise ValueError(f"output: wanted the folder of a run to go on with, got {output}, which has no env.json")
    saved = json.loads(path.read_text(encoding="utf-8"))["run"]
    # compared as text, because the order of methods counts: answers are filed by a method's place in it
    differing = [name for name in source if json.dumps(source[name]) != json.dumps(saved.get(name))]
    if differing:
        raise ValueError(
            f"output: the run in {output} was started with other {' and '.join(differing)}, or in another order"
        )
    if (output / "metrics.json").exists():
        raise ValueError(f"output: the run in {output} is complete")


def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[Any],
    manager: Any,
    settings: Settings,
    batch_size: int,
    responses: Path,
) -> Any:
    """The harness's results under the attention that the model has now."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    responses.parent.mkdir(exist_ok=True)
    log = logging.getLogger("lm_eval")
    log.setLevel(logging.ERROR)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=settings.max_length)
    # from here on the harness warns of things that a user must know, such as prompts that it cuts
    log.setLevel(logging.WARNING)
    # git would be asked for the commit of the current folder, and say "fatal" where that is no repository
    evaluator.get_git_commit_hash = lambda: None
    try:
        return evaluator.simple_evaluate(
            lm,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            use_cache=str(responses),
            bootstrap_iters=1000,
            apply_chat_template=settings.chat,
            confirm_run_unsafe_code=settings.run_generated_code,
        )
    except torch.OutOfMemoryError:
        raise torch.OutOfMemoryError(
            f"out of memory with batches of {batch_size}; the answers so far are kept in {responses.parent}: go on "
            "with --resume and a smaller --batch-size or a larger device"
        ) from None


def _line(label: str, task: str, sample: dict[str, Any]) -> dict[str, Any]:
    """A line of ``predictions.jsonl``, with a hash of the prompt, which itself can be found in the data."""
    kept = {name: sample[name] for name in ("doc_id", "filter", "target", "prompt_hash")}
    metrics = {name: sample[name] for name in sample["metrics"]}
    return {"method": label, "task": task, **kept, "prediction": sample["filtered_resps"], "metrics": metrics}


def _scores(label: str, results: Any) -> Iterator[Score]:
    """The harness's figures of one method: of tasks and groups, and of each value of the fields that split a task."""
    from lm_eval.api.metrics import mean_stderr

    for name, figures in results["results"].items():
        samples = results["samples"].get(name, [])
        fields = results["configs"].get(name, {}).get("metadata", {}).get("by", [])
        for key, value in figures.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or value == -1:  # RULER's -1: a length that was not asked for
                continue
            found = [each for each in samples if each["filter"] == kind and each.get(metric, -1) != -1]
            error = figures.get(f"{metric}_stderr,{kind}")
            n = len(found) or figures["sample_len"]
            yield Score(label, name, key, {}, value, error if isinstance(error, float) else None, n)
            for field in fields:
                for each in dict.fromkeys(sample["doc"][field] for sample in found):
                    part = [sample[metric] for sample in found if sample["doc"][field] == each]
                    error = mean_stderr(part) if len(part) > 1 else None
                    yield Score(label, name, key, {field: each}, sum(part) / len(part), error, len(part))
