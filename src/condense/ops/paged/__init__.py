"""Condensed attention over pages: many requests at once, whose tokens and entries lie in pages of one pool."""

from condense.ops.paged.api import read_paged
from condense.ops.paged.rows import TOGETHER
from condense.ops.step.pages import NewTokens, PagedSlots, PagedState, Pages
