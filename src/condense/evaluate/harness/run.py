"""`condense eval`: lm-evaluation-harness runs the tasks, once per method, and every answer is kept as it comes.

The folder of a run holds ``env.json`` (what was run, on what), ``responses/`` (one database per method: the model's
answers, by which an interrupted run goes on), and at the end ``predictions.jsonl``, ``metrics.json``, ``report.html``.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from condense.evaluate.bootstrap import Interval, bootstrap
from condense.evaluate.compare import attention_of
from condense.evaluate.harness.tasks import LoadedTasks, load_tasks, require_harness
from condense.evaluate.modes import in_eval_mode
from condense.files import whole_file
from condense.models import MethodChoice, methods_of
from condense.results import fingerprint, plain, provenance, write_results


@dataclass(frozen=True)
class Settings:
    """The settings of a run, which are the same for every method.

    tasks: names of the harness's tasks, groups and tags, and of our own. lengths: numbers of tokens, for tasks that
    make documents of several lengths. limit: number of documents of each task, the first ones; None: all. num_fewshot:
    None: each task's own number. max_length: tokens that the model may read, None: as its configuration says. chat:
    prompts are put into the tokenizer's chat template. data: folder of local files. run_generated_code: allow tasks
    that run programs written by the model. trust_remote_code: tasks that load the tokenizer may run code that comes
    with it.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = (4096,)
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 1
    max_length: int | None = None
    chat: bool = False
    data: Path | None = None
    run_generated_code: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Score:
    """One figure of one task under one method.

    metric: name and filter as the harness gives them. by: the values of the fields that the samples were split by,
    empty for all samples. harness: the harness's own figure, None for a part of the samples.
    """

    method: str
    task: str
    metric: str
    by: dict[str, Any]
    interval: Interval
    harness: float | None


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Mapping[str, MethodChoice],
    settings: Settings,
    output: Path,
    *,
    resume: bool = False,
    on_method: Callable[[str], None] = lambda label: None,
) -> list[Score]:
    """Run the tasks under every method and write the run's folder; on_method is called before each.

    model: a causal LM with stock attention, which it has afterwards too. methods: method by the name that its results
    get. output: a folder that does not exist yet; with ``resume`` the folder of the same run, interrupted earlier: then
    only the missing answers are computed.
    Raises ValueError as `load_tasks`, for a tokenizer without a chat template if one is wanted, for a method that the
    model cannot take, for a folder that exists or belongs to another run, and for a batch of methods that read a prompt
    at once; torch.OutOfMemoryError if half the batch does not fit either.
    """
    require_harness()
    if settings.chat and tokenizer.chat_template is None:
        raise ValueError(
            f"chat: wanted a tokenizer with a chat template, got that of {tokenizer.name_or_path}: leave it out"
        )
    for label, choice in methods.items():
        if settings.batch_size > 1 and any(each.layout.lookahead is not None for each in methods_of(choice)):
            raise ValueError(
                f"batch size must be 1 for {label}, which reads whole prompts at once, padding behind them too, "
                f"got {settings.batch_size}"
            )
        with attention_of(model, choice):  # fail now if the model cannot take a method, not after hours of others
            pass
    metadata = {"tokenizer": tokenizer.name_or_path, "max_seq_lengths": list(settings.lengths)}
    metadata |= {"data": str(settings.data)} if settings.data else {}
    metadata["trust_remote_code"] = settings.trust_remote_code
    source = {"settings": plain(settings), "methods": {k: plain(v) for k, v in methods.items()}}
    source["model"] = fingerprint(model)
    tasks = load_tasks(settings.tasks, metadata, data=settings.data, run_generated_code=settings.run_generated_code)
    _open(output, source, resume=resume)
    scores: list[Score] = []
    lines: list[dict[str, Any]] = []
    with in_eval_mode(model):
        for number, (label, choice) in enumerate(methods.items()):
            on_method(label)
            with attention_of(model, choice):
                results = _run(model, tokenizer, settings, tasks, output / "responses" / str(number))
            lines += [_line(label, task, sample) for task, found in results["samples"].items() for sample in found]
            scores += _scores(label, results, tasks.loaded)
    # an interrupted run may have left predictions, but never metrics
    with whole_file(output / "predictions.jsonl", overwrite=True) as file:
        file.writelines(json.dumps(plain(line), ensure_ascii=False).encode() + b"\n" for line in lines)
    write_results(output / "metrics.json", {"run": source, "scores": scores}, device=model.device)
    return scores


def saved_scores(output: Path) -> tuple[list[Score], dict[str, Any]]:
    """The scores of a finished run, from the ``metrics.json`` in its folder, and the provenance that it names."""
    document = json.loads((output / "metrics.json").read_text(encoding="utf-8"))

    def score(saved: dict[str, Any]) -> Score:
        interval = saved["interval"]
        value, low, high = (math.nan if interval[key] is None else interval[key] for key in ("value", "low", "high"))
        return Score(**saved | {"interval": Interval(value, low, high, interval["n"])})  # JSON has no NaN

    return [score(saved) for saved in document["results"]["scores"]], document["provenance"]


def _open(output: Path, source: dict[str, Any], *, resume: bool) -> None:
    """Make the folder with its ``env.json``, or find that it belongs to this run."""
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
    if (output / "metrics.json").exists():
        raise ValueError(f"output: the run in {output} is complete")
    saved = json.loads(path.read_text(encoding="utf-8"))["run"]
    # compared as text, because the order of methods counts: answers are filed by a method's place in it
    differing = [name for name in source if json.dumps(source[name]) != json.dumps(saved.get(name))]
    if differing:
        raise ValueError(
            f"output: the run in {output} was started with other {' and '.join(differing)}, or in another order"
        )


def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    tasks: LoadedTasks,
    responses: Path,
) -> Any:
    """The harness's results under the attention that the model has now."""
    size = settings.batch_size
    try:
        return _simple_evaluate(model, tokenizer, settings, tasks, responses, size)
    except torch.OutOfMemoryError:
        if size == 1:
            raise torch.OutOfMemoryError(_out_of_memory(responses, size)) from None
    torch.cuda.empty_cache()
    try:
        return _simple_evaluate(model, tokenizer, settings, tasks, responses, size // 2)
    except torch.OutOfMemoryError:
        raise torch.OutOfMemoryError(_out_of_memory(responses, size // 2)) from None


def _out_of_memory(responses: Path, size: int) -> str:
    return (
        f"out of memory with batches of {size}; the answers so far are kept in {responses.parent}: go on with "
        "--resume on a larger device, or begin again with a smaller --max-length or another method"
    )


def _simple_evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    tasks: LoadedTasks,
    responses: Path,
    batch_size: int,
) -> Any:
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=settings.max_length)
    responses.parent.mkdir(exist_ok=True)
    # from here on the harness warns of things that a user must know, such as prompts that it cuts
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    # git would be asked for the commit of the current folder, and say "fatal" where that is no repository
    evaluator.get_git_commit_hash = lambda: None
    return evaluator.simple_evaluate(
        lm,
        tasks=[*tasks.loaded["groups"].values(), *_alone(tasks.loaded)],
        task_manager=tasks.manager,
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        use_cache=str(responses),
        bootstrap_iters=0,
        apply_chat_template=settings.chat,
        confirm_run_unsafe_code=settings.run_generated_code,
    )


def _alone(loaded: Any) -> list[Any]:
    """Tasks that belong to no group."""
    grouped = {task.task_name for group in loaded["groups"].values() for task in group.get_all_tasks()}
    return [task for name, task in loaded["tasks"].items() if name not in grouped]


def _line(label: str, task: str, sample: dict[str, Any]) -> dict[str, Any]:
    """A line of ``predictions.jsonl``, with a hash of the prompt, which itself can be found in the data."""
    return {
        "method": label,
        "task": task,
        "doc_id": sample["doc_id"],
        "filter": sample["filter"],
        "target": sample["target"],
        "prediction": sample["filtered_resps"],
        "prompt_hash": sample["prompt_hash"],
        "metrics": {name: sample[name] for name in sample["metrics"]},
    }


def _scores(label: str, results: Any, loaded: dict[str, Any]) -> list[Score]:
    """All figures of one method: of tasks, of their parts, and of groups, for which there is no interval."""
    scores = []
    for name, samples in results["samples"].items():
        task, figures = loaded["tasks"][name], results["results"][name]
        fields = (task.config.metadata or {}).get("by", [])
        for key, value in figures.items():
            metric, _, filter_key = key.partition(",")
            if not filter_key or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            found = [sample for sample in samples if sample["filter"] == filter_key and metric in sample]
            # RULER has a metric for each length, which is -1 in samples of other lengths
            found = [sample for sample in found if not (metric.isdecimal() and sample[metric] == -1)]
            if not found:
                continue
            figure = _figure(task, metric)
            scores.append(Score(label, name, key, {}, _interval(found, metric, figure), float(value)))
            for field in fields:
                for each in dict.fromkeys(sample["doc"][field] for sample in found):
                    part = [sample for sample in found if sample["doc"][field] == each]
                    scores.append(Score(label, name, key, {field: each}, _interval(part, metric, figure), None))
    for name, figures in results.get("groups", {}).items():
        members = loaded["groups"][name].get_all_tasks()
        for key, value in figures.items():
            metric, _, filter_key = key.partition(",")
            if filter_key and not metric.endswith("_stderr") and isinstance(value, int | float) and value != -1:
                n = sum(results["n-samples"][task.task_name]["effective"] for task in members)
                scores.append(Score(label, name, key, {}, Interval(float(value), math.nan, math.nan, n), float(value)))
    return scores


def _figure(task: Any, metric: str) -> Callable[[Sequence[Any]], float] | None:
    """The function by which the harness aggregates a metric over samples; None for the mean."""
    from lm_eval.api.metrics import mean

    figure = task.aggregation().get(metric, mean)
    return None if figure is mean or metric.isdecimal() else figure


def _interval(samples: Sequence[dict[str, Any]], metric: str, figure: Any) -> Interval:
    return bootstrap([sample[metric] for sample in samples], figure)
