"""Recall: exact tokens of closed groups stay in a store; each query opens the few groups that an index ranks first."""

from condense.ops.recall.api import Unchosen, attend_recall, recall_step
from condense.ops.recall.choice import (
    ArrayChoice,
    Choice,
    IndexChoice,
    Quota,
    choose_groups,
    chosen_groups,
    index_scores,
)
from condense.ops.recall.index import INDEX_BITS, INDEX_KINDS, GroupIndex, IndexKind, IndexSettings, build_index
from condense.ops.recall.state import RecallSettings, RecallState

__all__ = [
    "INDEX_BITS",
    "INDEX_KINDS",
    "ArrayChoice",
    "Choice",
    "GroupIndex",
    "IndexChoice",
    "IndexKind",
    "IndexSettings",
    "Quota",
    "RecallSettings",
    "RecallState",
    "Unchosen",
    "attend_recall",
    "build_index",
    "choose_groups",
    "chosen_groups",
    "index_scores",
    "recall_step",
]
