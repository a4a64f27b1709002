"""Progress of a command where no terminal shows a bar, as in the log of a batch job."""

from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_FIRST, _BETWEEN = 5, 30  # seconds: a short command prints nothing
_PERIOD = 3600  # most seconds of past progress by which the time that is left is estimated


class Lines(Progress):
    """Lines as ``verifying: 3/16 0:01:42 left: 0:07:22``: after 5 seconds, then every 30 seconds, and at the end."""

    def __init__(self, console: Console) -> None:
        times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
        columns = (TextColumn("{task.description}:"), MofNCompleteColumn(), *times)
        super().__init__(*columns, console=console, disable=True, speed_estimate_period=_PERIOD)
        self._next, self._has_begun = self.get_time() + _FIRST, False

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task, and print the line if it is time."""
        self.update(task_id, advance=advance)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task as `Progress` does, and print the line if it is time."""
        super().update(task_id, **changes)
        now = self.get_time()
        if now >= self._next or (self._has_begun and self.finished):
            self._next, self._has_begun = now + _BETWEEN, True
            self.console.print(self.get_renderable())
