"""Recall's terms: exact tokens of closed groups stay in a store; each query opens the few that an index ranks first."""

from condense.ops.recall.choice import Askers, IndexChoice, Quota, RecallSources, choose_groups, index_scores
from condense.ops.recall.index import GroupIndex, block_width, rotated_queries, rotation, split_keys
from condense.ops.recall.rest import GroupMeans
from condense.ops.recall.store import StoreFormat
