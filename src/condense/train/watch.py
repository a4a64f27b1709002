"""A phase seen while it runs: one line per log entry on standard output, and all of it as JSON lines."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

LOG = "log.jsonl"
_EARLY = 10  # steps, after which the time that the run will take is known


class Watch(TrainerCallback):
    """Appends every entry of Trainer's log to ``folder/log.jsonl``, and prints it if ``lines``.

    There is one after ten steps, too, which tells how long the run will take, and one after the last.
    After a resumed checkpoint the steps behind it stand there twice; the later entry counts.
    """

    def __init__(self, name: str, folder: Path, *, lines: bool) -> None:
        self._name = name
        self._file = folder / LOG
        self._lines = lines

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for the early entry and the last."""
        if state.global_step in (_EARLY, state.max_steps):
            control.should_log = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write and print one entry; other processes than the first do neither."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:  # Trainer's summary at the end
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        if self._lines:
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in logs.items() if "_" in name)
            print(f"{self._name} step {state.global_step}/{state.max_steps}  {numbers}", flush=True)
