"""One decode step: its settings, its state as a table of buffers or in records of pages, its arguments."""

from condense.ops.step.call import NewToken, StepCall
from condense.ops.step.records import record_format
from condense.ops.step.settings import ChoiceSettings, StepSettings, StoreSettings
from condense.ops.step.state import Per, StateSizes, StepState, clear_state, empty_state, entry_names, fields_of
