"""One decode step: its settings, its state as a table of buffers, its arguments; pages, another way to find rows."""

from condense.ops.step.call import NewToken, OwnEntries, StepCall
from condense.ops.step.pages import NewTokens, PagedState, Pages
from condense.ops.step.records import Part, RecordFormat, record_format
from condense.ops.step.settings import ChoiceSettings, StepSettings, StoreSettings
from condense.ops.step.state import Per, StateSizes, StepState, clear_state, empty_state, entry_names, fields_of
