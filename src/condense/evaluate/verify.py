"""Measuring what settings lose of one's own model and text, through the caches, stores and steps that they are for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from condense.config import Natural, Positive, check_fields, check_int
from condense.evaluate.compare import attention_of
from condense.evaluate.intervals import Cell, Proportion
from condense.evaluate.verify_texts import TASKS, DenseReading, TextReading, VerifyText, read_text, verify_texts
from condense.methods import Dense, Method, Recall, StreamingLLM
from condense.models import MethodChoice, check_stock, condensed_layers, described, in_eval_mode
from condense.models.families import check_learned_positions
from condense.models.inspect import cache_shares, inspect
from condense.tasks import LEAST_FOUND, encode_corpus

DENSE, WINDOW, ALL_OPEN = "dense", "window 25 %", "all open"
KINDS = ("far", "other", "copy")
_DEPTHS = 5  # parts of a text for which answers are counted separately


@dataclass(frozen=True)
class VerifyConfig:
    """The measurement's size.

    lengths: tokens of a text, one or more, each >= 256. texts: of each kind and length. questions: per text and task,
    fewer where they do not fit. greedy: tokens that dense attention writes after the first text.
    Raises ValueError for a field out of range or of another type.
    """

    lengths: tuple[int, ...]
    texts: Positive = 4
    questions: Positive = 32
    greedy: Natural = 512
    seed: Natural = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.lengths:
            raise ValueError("lengths must hold one length at least, got none")
        for length in self.lengths:
            check_int("lengths", length, 256)
        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))


@dataclass(frozen=True)
class AtLength:
    """One setting at one length.

    cells: by kind of token (``far``: those that need far text; ``other``; ``copy``) and by task, without tasks of which
    dense attention finds less than 60 %. losses, divergence: means over stretches of the texts' second half, in nats
    per token. found, by_depth: of each task, over all and in each fifth of the text, the first one first. greedy: share
    of steps whose most likely token is dense attention's, given the same text. failed: cells that miss the bar.
    """

    length: int
    cells: dict[str, Cell]
    losses: list[float]
    divergence: list[float]
    found: dict[str, Proportion]
    by_depth: dict[str, list[Proportion]]
    greedy: Proportion
    failed: list[str] = field(init=False)

    def __post_init__(self) -> None:
        missed = [name for name, cell in self.cells.items() if not cell.passes(name in TASKS)]
        object.__setattr__(self, "failed", missed)


@dataclass(frozen=True)
class Verified:
    """One setting. device, host: bytes of its cache after the longest text, as shares of dense attention's.
    opens_all: True if layers choose among groups, but even at the end of the longest text each opens all.

    For `WINDOW`, which has another size at each length, settings are those of the longest text.
    """

    name: str
    settings: str
    device: float
    host: float
    lengths: list[AtLength]
    opens_all: bool

    @property
    def failed(self) -> list[tuple[int, str]]:
        """Length and name of the cells in which the bar is not met."""
        return [(each.length, name) for each in self.lengths for name in each.failed]


def verify(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    methods: Mapping[str, MethodChoice],
    config: VerifyConfig,
    *,
    on_step: Callable[[int], None] = lambda total: None,
) -> list[Verified]:
    """Measure dense attention, the methods, a window of 25 % and Recall with all groups open, in this order.

    A good setting keeps what dense attention does; the window must not, else the texts show nothing; all groups open
    is dense attention computed by Recall, so that what it loses is the measurement's noise.

    model: a causal LM with stock attention, which it has afterwards too. documents: text to cut and hide numbers in.
    methods: by the name that their results get. on_step: called after each text and setting with their number.
    Raises ValueError for a condensed model, a method it cannot take, a name of the controls, texts longer than the
    model's learned positions, and as `verify_texts`.
    """
    check_stock(model)
    if taken := {DENSE, WINDOW, ALL_OPEN} & set(methods):
        raise ValueError(
            f"methods: wanted names other than those of the controls, got {', '.join(taken)}: leave out what is always "
            "measured"
        )
    corpus = encode_corpus(documents, tokenizer)
    drawn = [
        verify_texts(tokenizer, corpus, length, config.texts, questions=config.questions, seed=config.seed)
        for length in config.lengths
    ]
    longest = max(max(len(text.ids), text.copy + config.greedy) for texts in drawn for text in texts)
    check_learned_positions(model.config, "texts, and greedy tokens after them,", longest)
    # dense attention first, because the others are measured against it
    arms: dict[int, dict[str, MethodChoice]] = {
        length: {
            DENSE: Dense(),
            **methods,
            WINDOW: StreamingLLM(sink=4, window=length // 4 - 4),
            ALL_OPEN: Recall(window=64, num_recall=length, unchosen="drop"),
        }
        for length in config.lengths
    }
    opens_all = {}
    for name, method in arms[config.lengths[-1]].items():  # fail now if the model cannot take one
        with attention_of(model, method):
            opens_all[name] = _opens_all(condensed_layers(model).values(), config.lengths[-1])
    total = len(config.lengths) * (len(methods) + 3) * config.texts
    results: dict[str, list[AtLength]] = {}
    with in_eval_mode(model):
        for length, texts in zip(config.lengths, drawn, strict=True):
            read: dict[str, list[TextReading]] = {name: [] for name in arms[length]}
            # text by text, so that dense attention's logits of one text are held at a time
            for index, text in enumerate(texts):
                dense = DenseReading()
                for name, method in arms[length].items():
                    read[name].append(read_text(model, text, method, dense, config.greedy if index == 0 else 0))
                    on_step(total)
            for name, arm in read.items():
                results.setdefault(name, []).append(_at_length(length, texts, arm, read[DENSE]))
    verified = []
    for name, method in arms[config.lengths[-1]].items():
        shares = cache_shares(inspect(model, method, config.lengths[-1], model.dtype.itemsize))
        verified.append(Verified(name, described(method), *shares, results[name], opens_all[name]))
    return verified


def _opens_all(methods: Iterable[Method], length: int) -> bool:
    """True if some layers choose among groups, but all of these open every group after ``length`` tokens."""
    layouts = [method.layout for method in methods]
    chosen = [(x.choice, x.rule.closed(length)) for x in layouts if x.choice is not None]
    return len(chosen) > 0 and all(
        quota.at(closed) == closed for choice, closed in chosen for quota in (choice.quota, choice.prompt_quota)
    )


def _at_length(
    length: int, texts: Sequence[VerifyText], arm: Sequence[TextReading], dense: Sequence[TextReading]
) -> AtLength:
    """The figures of a setting, from its reading of each text and dense attention's."""
    cells, found, by_depth = {}, {}, {}
    for kind in KINDS:
        pairs = [(a.sums[kind], d.sums[kind]) for a, d in zip(arm, dense, strict=True)]
        table = np.array([(loss, of_dense, n) for (loss, n), (of_dense, _) in pairs if n], float).reshape(-1, 3)
        if len(table):
            cells[kind] = Cell.of(*table.T, relative=False)
    for task in TASKS:
        right = [(a.right[task], d.right[task]) for a, d in zip(arm, dense, strict=True)]
        rows = [(sum(a), sum(d), len(d)) for a, d in right]
        cell = Cell.of(*np.array(rows, float).T, relative=True)
        if cell.dense >= LEAST_FOUND:
            cells[task] = cell
        outcomes = [outcome for of_text, _ in right for outcome in of_text]
        places = [int(depth * _DEPTHS) for text in texts for depth in text.asked[task].depths]
        found[task] = Proportion.of(outcomes)
        by_depth[task] = [
            Proportion.of([outcome for outcome, at in zip(outcomes, places, strict=True) if at == place])
            for place in range(_DEPTHS)
        ]
    losses = np.mean([reading.losses for reading in arm], axis=0).tolist()
    divergence = np.mean([reading.divergence for reading in arm], axis=0).tolist()
    greedy = Proportion.of([step for reading in arm for step in reading.same])
    return AtLength(length, cells, losses, divergence, found, by_depth, greedy)
