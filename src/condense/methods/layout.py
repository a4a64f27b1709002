"""A method as data: which tokens become which entries, when, and with which bias.

Shapes: c tokens per chunk, p entries per chunk. A chunk is the tokens that a method handles together.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self, get_args

from torch import Tensor

from condense.config import Bits, check_choice, check_int
from condense.ops import ChoiceSettings, Coarse, CoarseRule, Pooling, UniformRule
from condense.ops.checks import check_poolings
from condense.ops.tensors.per_row import PerRow, int_if_equal


class ChunkPooling(NamedTuple):
    """A method's `condense.Method.represent` described as data, by which kernels make the same entries.

    key, value: how a chunk's tokens are pooled into its last entry. num_focal: how many tokens become entries of their
    own: those with the highest scores, ties to the earlier; they come first, by position.
    """

    key: Pooling
    value: Pooling
    num_focal: int = 0


# means of keys and of values; the mean of a chunk of one token is this token
MEANS = ChunkPooling("mean", "mean")


class Lookahead(NamedTuple):
    """Marks a method that looks ahead: a query can see entries that depend on queries after it.

    Such a method is for inference. permitted: the user allows training all the same (``allow_future``); None for a
    method without this setting.
    causal_setting: a setting or method that does not look ahead, for error messages.
    """

    permitted: bool | None
    causal_setting: str


class FirstEntries(NamedTuple):
    """Entries that stand before those of a row's chunk 0, and that all later queries see; chunks make none of them.

    num: their number. single: how many of them, at the beginning, stand for a single token each and have no bias; the
    others have the bias of a chunk's last entry. Both are an int where the rows agree, else int64 CPU ``[B]``.
    """

    num: PerRow = 0
    single: PerRow = 0

    @classmethod
    def of(cls, num: Tensor, single: Tensor) -> Self:
        """First entries from their numbers per row, int64 CPU ``[B]``, which become ints where all rows agree."""
        return cls(int_if_equal(num), int_if_equal(single))

    @property
    def exist(self) -> bool:
        """True if any row has such entries."""
        return isinstance(self.num, Tensor) or self.num > 0


NO_FIRST = FirstEntries()


@dataclass(frozen=True)
class Layout:
    """The tokens that a query sees exactly, and the p entries that each earlier chunk of c tokens becomes.

    rule: the window, the chunks behind it, their entries. summary_delay: tokens after a chunk's last one until it is
    pooled, at most the window. num_summary: number of queries whose mean weighs a chunk, the last of them
    ``summary_delay`` tokens after the chunk's last; 0: none needed. pooling: how kernels make the entries; None if only
    `condense.Method.represent` can. bias: numbers added to the scaled scores of a chunk's p entries; empty for none.
    matched: each entry has a bias of its own, which ``represent`` returns. entry_bits: 16, or 8 or 4 for entries that
    are rounded when they are made, which ``represent`` leaves to its callers. choice: how queries choose the closed
    groups whose tokens they see, which a store keeps; None if no token of a closed chunk is kept. lookahead: None for a
    causal method. coarse: the coarse entries that old entries are merged into; None if all entries are kept.
    """

    rule: UniformRule
    summary_delay: int = 0
    num_summary: int = 0
    pooling: ChunkPooling | None = None
    bias: tuple[float, ...] = ()
    matched: bool = False
    entry_bits: int = 16
    choice: ChoiceSettings | None = None
    lookahead: Lookahead | None = None
    coarse: Coarse | None = None

    @property
    def coarse_rule(self) -> CoarseRule | None:
        """The rule of entries on two scales, None on one."""
        return None if self.coarse is None else CoarseRule(self.rule, self.coarse)

    @property
    def made(self) -> tuple[UniformRule, int]:
        """The rule of the entries that stay for good, and how many tokens after a chunk's last one they are made."""
        return (self.rule, self.summary_delay) if self.coarse_rule is None else self.coarse_rule.made_by


_RECORDS = {"pooling": ChunkPooling, "choice": ChoiceSettings, "lookahead": Lookahead, "coarse": Coarse}


def check_layout(layout: Layout) -> None:
    """Raise ValueError for anything but a `Layout`, and for numbers that no method can have."""
    if not isinstance(layout, Layout):
        raise ValueError(f"layout: wanted a condense.methods.layout.Layout, got {layout!r}")
    rule, bias = layout.rule, layout.bias
    # not by `check_fields`, which torch.compile cannot trace
    if type(rule) is not UniformRule:  # caches and kernels read its numbers, and not the `spans` of a derived class
        raise ValueError(
            f"layout: rule must be a condense.ops.UniformRule (condense.ops.attend takes any), got {rule!r}"
        )
    for name, kind in _RECORDS.items():
        if not isinstance(getattr(layout, name), kind | None):
            raise ValueError(f"layout: {name} must be a {kind.__name__} or None, got {getattr(layout, name)!r}")
    check_int("layout: chunk", rule.chunk, 1)
    check_int("layout: entries", rule.entries, 1)
    check_int("layout: window", 0 if rule.window is None else rule.window, 0)
    check_int("layout: max_chunks", 0 if rule.max_chunks is None else rule.max_chunks, 0)
    check_int("layout: num_summary", layout.num_summary, 0)
    check_int("layout: summary_delay", layout.summary_delay, 0)
    check_choice("layout: entry_bits", layout.entry_bits, get_args(Bits))
    if layout.pooling is not None:
        check_poolings("layout: pooling", *layout.pooling[:2], scored=layout.num_summary > 0)
        if rule.entries != layout.pooling.num_focal + 1:
            raise ValueError(
                f"layout: pooling makes num_focal + 1 entries of a chunk, {layout.pooling.num_focal + 1}, but the rule "
                f"has entries={rule.entries}: make them agree, or leave pooling out"
            )
    if layout.choice is not None and layout.pooling is not None and (layout.pooling != MEANS or layout.matched):
        raise ValueError(
            "layout: with a choice, pooling must be means without biases of their own, or None for an own represent, "
            f"got {layout.pooling} and matched={layout.matched}"
        )
    if rule.window is not None and layout.summary_delay > rule.window:
        raise ValueError(
            f"layout: summary_delay must be at most the window, {rule.window}, after which queries see a chunk's "
            f"entries, got {layout.summary_delay}"
        )
    numbers = isinstance(bias, tuple) and all(isinstance(x, int | float) and math.isfinite(x) for x in bias)
    if not numbers or len(bias) not in (0, rule.entries):
        raise ValueError(
            f"layout: bias must be a tuple with a finite number for each entry of a chunk, {rule.entries}, or empty, "
            f"got {bias!r}"
        )
    if layout.matched and bias:
        raise ValueError(f"layout: bias must be empty if matched, as `represent` returns each entry's bias, got {bias}")
    if layout.coarse is not None:
        _check_coarse(layout, layout.coarse)


def _check_coarse(layout: Layout, coarse: Coarse) -> None:
    """Raise ValueError for coarse entries that no method can have."""
    rule = layout.rule
    check_int("layout: coarse.chunks", coarse.chunks, 2)
    least = None if rule.window is None else rule.window + 2 * rule.chunk
    if least is None or coarse.window < least or not math.isfinite(coarse.bias):
        raise ValueError(
            f"layout: coarse must have a finite bias and a window of two chunks more than the window of tokens, "
            f"{least} or more, got {coarse}"
        )
    plain = Layout(rule, layout.summary_delay, layout.num_summary, layout.pooling, layout.bias, coarse=coarse)
    focal = layout.pooling is not None and layout.pooling.num_focal > 0
    if layout != plain or rule.entries != 1 or rule.max_chunks is not None or focal:
        raise ValueError(
            "layout: coarse entries are means of 16-bit entries, one for each chunk, without a choice, matched biases "
            f"or a lookahead, got {layout}"
        )


def first_tokens(window: int | None, kept: int, lookahead: Lookahead | None = None) -> Layout:
    """A layout without pooling: the first ``kept`` tokens, as entries, and the last ``window``, None for all tokens."""
    return Layout(UniformRule(chunk=1, window=window, max_chunks=kept), pooling=MEANS, lookahead=lookahead)
