"""LongBench from local files: the authors' own, and MiniLongBench's prompts, which hold context and question."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

# the harness has a file of prompt and metrics for each task, whose rows these are
_PASSAGES = "hotpotqa"  # in MiniLongBench, Qasper's articles stand in its prompt


def longbench_row(line: dict[str, Any], name: str | None, split: str) -> dict[str, Any] | None:
    """A row with ``context``, ``question``, ``answers`` and ``all_classes``, as the harness's prompts and metrics want.

    line: of the authors' files (``input`` is the question), or of MiniLongBench (``task``, ``origin_prompt``,
    ``gold``), whose rows of other tasks than ``name`` give None; LongBench-E (``name_e``) is not in it.
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
    """The prompt that the harness's file has for a task, as a pattern of context and question."""
    import lm_eval
    from lm_eval.tasks._yaml_loader import load_yaml

    file = Path(lm_eval.__file__).parent / "tasks" / "longbench" / f"{task}.yaml"
    parts = re.split(r"\{\{(\w+)\}\}", load_yaml(file, resolve_func=False)["doc_to_text"])
    pattern = "".join(f"(?P<{part}>.*)" if i % 2 else re.escape(part) for i, part in enumerate(parts))
    # MiniLongBench has a blank or a line's end behind some prompts
    return re.compile(pattern + (r"\s*" if parts[-1] else ""), re.DOTALL)
