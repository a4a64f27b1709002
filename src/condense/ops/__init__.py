"""Numerics: attention over a list of sources, pooling and decode steps; a plain definition and faster backends."""

from condense.ops.api import (
    attend,
    attend_recall,
    decode_step,
    group_scores,
    importance,
    keep_groups,
    largest_weights,
    make_entries,
    matched_bias,
    pool,
    pool_groups,
    summarize,
    unpack_store,
)
from condense.ops.backends import resolve_backend, resolve_pooling, step_backend
from condense.ops.coarse import Coarse, CoarseRule
from condense.ops.entries import EntryFormat
from condense.ops.spans import ArraySpans, Hull, RuleSpans, Source, Span, Spans, UniformRule, document_spans
from condense.ops.step import ChoiceSettings, NewToken, StepCall, StepSettings, StepState, StoreSettings
from condense.ops.types import NO_EXTRAS, POOLINGS, Chunks, Extras, Pooling, Problem, SummaryColumns, SummarySpans
