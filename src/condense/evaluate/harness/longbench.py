"""LongBench from local files: the authors' own, or MiniLongBench's, whose prompts hold context and question."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

_PASSAGES = "hotpotqa"  # MiniLongBench puts Qasper's articles into the prompt of this task


def longbench_row(line: dict[str, Any], name: str | None, split: str) -> dict[str, Any] | None:
    """A row with ``context``, ``question``, ``answers`` and ``all_classes``, as the harness's prompts and metrics want.

    line: of the authors' files (``input`` is the question), or of MiniLongBench (``task``, ``origin_prompt``,
    ``gold``), where lines of other tasks than ``name`` give None; MiniLongBench does not have LongBench-E (``name_e``).
    Raises ValueError for a prompt that is not of the task's form.
    """
    if "origin_prompt" not in line:
        fields = {field: line.get(field) for field in ("context", "answers", "all_classes", "length")}
        return fields | {"question": line["question"] if "question" in line else line["input"]}
    if line["task"] != name:
        return None
    found = next((match for each in (name, _PASSAGES) if (match := _form(each).fullmatch(line["origin_prompt"]))), None)
    if found is None:
        raise ValueError(f"longbench: line {line.get('index')} of {name} is not in LongBench's prompt")
    gold = line["gold"] if isinstance(line["gold"], dict) else {"answers": line["gold"], "all_classes": None}
    parts = {"context": "", "question": ""} | found.groupdict()
    return parts | {field: gold[field] for field in ("answers", "all_classes")}


@functools.cache
def _form(task: str) -> re.Pattern[str]:
    """The prompt in the harness's file for a task, as a pattern whose named groups are context and question."""
    import lm_eval
    from lm_eval.tasks._yaml_loader import load_yaml

    file = Path(lm_eval.__file__).parent / "tasks" / "longbench" / f"{task}.yaml"
    parts = re.split(r"\{\{(\w+)\}\}", load_yaml(file, resolve_func=False)["doc_to_text"])
    pattern = "".join(f"(?P<{part}>.*)" if i % 2 else re.escape(part) for i, part in enumerate(parts))
    # in MiniLongBench some prompts end with a blank or a newline
    return re.compile(pattern + (r"\s*" if parts[-1] else ""), re.DOTALL)
