"""The settings of a decode step: one record for every method, in rings and in pages, with or without stored groups.

Shapes: g tokens per group.
"""

import functools
import hashlib
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self

from condense.ops.coarse import Coarse, CoarseRule
from condense.ops.entries import EntryFormat
from condense.ops.recall.choice import Quota
from condense.ops.recall.store import StoreFormat
from condense.ops.spans import UniformRule
from condense.ops.types import Pooling


class StoreSettings(NamedTuple):
    """The store of exact tokens.

    bits: of `condense.ops.recall.StoreFormat`. on_host: whether it lies in host memory, which is pinned beside a GPU.
    slots: groups of which the device keeps a copy, per row and KV head; 0 for a store on the device.
    """

    bits: int = 16
    on_host: bool = False
    slots: int = 0


@dataclass(frozen=True)
class ChoiceSettings:
    """The choice of the closed groups that a query opens, to see their exact tokens; no group has an entry.

    quota: number of groups to open. store: of their tokens. mean: queries see the closed groups that they do not open
    as one token (`condense.ops.recall.rest`). prompt: how a call with several queries reads them: each chooses groups
    as a single one does ("recall"), none chooses and all see the tokens of all groups ("exact"), or some choose for
    others ("shared", see `condense.ops.recall.choice.Askers`).
    """

    quota: Quota
    store: StoreSettings
    mean: bool
    prompt: Literal["recall", "exact", "shared"]

    @property
    def prompt_quota(self) -> Quota:
        """The number of groups that a prompt's queries open: all with "exact"; with "shared" the last may open more."""
        return {"recall": self.quota, "exact": Quota(), "shared": self.quota.shared}[self.prompt]


@dataclass(frozen=True)
class StepSettings:
    """The settings of a method that a decode step needs.

    A torch operation cannot take an object: it gets their ``number`` and finds them by `numbered_settings`.

    key_pooling, value_pooling: poolings that make a chunk's last entry; None if only ``represent`` can make it.
    biases: added to the scaled scores of a chunk's entries, one number for each; empty for none.
    num_focal: number of tokens of a chunk that become entries of their own: those with the highest scores, ties to the
    earlier; they come first, in order of position. has_first: True if rows may have first entries.
    matched: each entry has a bias of its own (`condense.ops.matched_bias`) in place of ``biases``.
    entry_bits: of `condense.ops.entries.EntryFormat`; with 8 or 4 bits, an entry is rounded when it is made.
    choice: the groups whose exact tokens a query sees; None for a method that keeps no tokens of closed groups.
    coarse: the coarse entries that old entries are merged into; None if entries stay as they are.
    """

    rule: UniformRule
    summary_delay: int
    num_summary: int
    key_pooling: Pooling | None
    value_pooling: Pooling | None
    biases: tuple[float, ...]
    num_focal: int = 0
    has_first: bool = False
    matched: bool = False
    entry_bits: int = 16
    choice: ChoiceSettings | None = None
    coarse: Coarse | None = None

    def __post_init__(self) -> None:
        """Enter the settings into the table that `numbered_settings` reads."""
        known = _NUMBERED.setdefault(self.number, self)
        assert known == self, "other settings have this number"

    @functools.cached_property
    def number(self) -> int:
        """An int that stands for these settings in a torch operation's arguments; the same in every process."""
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=7).digest())

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """Unpickle by calling the class, so that the settings enter the table of that process."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @property
    def coarse_rule(self) -> CoarseRule | None:
        """The rule of entries on two scales, None on one."""
        return None if self.coarse is None else CoarseRule(self.rule, self.coarse)

    @property
    def entry_format(self) -> EntryFormat:
        """The format of entries."""
        return EntryFormat(self.entry_bits)

    @property
    def store_format(self) -> StoreFormat:
        """The format of the tokens of closed groups; only with a ``choice``."""
        assert self.choice is not None
        return StoreFormat(self.choice.store.bits, self.rule.chunk)

    @property
    def sees_rest(self) -> bool:
        """True if queries see the groups that they do not open, as one token."""
        return self.choice is not None and self.choice.mean

    @property
    def reads_exactly(self) -> bool:
        """True if the queries of a call with several see the tokens of all groups."""
        return self.choice is not None and self.choice.prompt == "exact"

    @property
    def reads_otherwise(self) -> bool:
        """True if a call with several queries sees other groups than single queries would."""
        return self.choice is not None and self.choice.prompt != "recall"

    @property
    def bias(self) -> float:
        """Bias of a chunk's last entry, for kernels; 0.0 for none."""
        is_made = self.key_pooling is not None or self.coarse is not None
        return self.biases[-1] if self.biases and is_made else 0.0


_NUMBERED: dict[int, StepSettings] = {}


def numbered_settings(number: int) -> StepSettings:
    """The settings that have this number."""
    return _NUMBERED[number]
