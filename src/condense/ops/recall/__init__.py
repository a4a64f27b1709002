"""Recall: exact tokens of closed groups stay in a store; each query opens the few groups that an index ranks first."""

from condense.ops.recall.api import Unchosen, attend_recall, prepare_recall_step, recall_step
from condense.ops.recall.choice import (
    ArrayChoice,
    Choice,
    IndexChoice,
    Quota,
    choose_groups,
    chosen_groups,
    index_scores,
)
from condense.ops.recall.index import INDEX_KINDS, GroupIndex, IndexKind, IndexSettings, build_index
from condense.ops.recall.sources import RecallSources
from condense.ops.recall.state import EntrySettings, RecallSettings, RecallState
from condense.ops.recall.store import StoreFormat

__all__ = [
    "INDEX_KINDS",
    "ArrayChoice",
    "Choice",
    "EntrySettings",
    "GroupIndex",
    "IndexChoice",
    "IndexKind",
    "IndexSettings",
    "Quota",
    "RecallSettings",
    "RecallSources",
    "RecallState",
    "StoreFormat",
    "Unchosen",
    "attend_recall",
    "build_index",
    "choose_groups",
    "chosen_groups",
    "index_scores",
    "prepare_recall_step",
    "recall_step",
]
