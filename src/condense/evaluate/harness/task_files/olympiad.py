"""OlympiadBench's mathematics in English without pictures: the prompt, and how answers are compared.

The harness imports this file by the names in the YAML.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.tasks.hendrycks_math.utils import is_equiv, last_boxed_only_string, remove_boxed


def prompt(doc: dict[str, Any]) -> str:
    """The problem with what is said of its answer: its kind, its unit, whether there are several."""
    kind = (doc.get("answer_type") or "an expression").lower()
    several = (
        "several answers, separated by commas, each of the kind" if doc.get("is_multiple_answer") else "of the kind"
    )
    unit = f" Give it in {doc['unit']}, without writing the unit." if doc.get("unit") else ""
    return (
        "Solve this problem of an international mathematics competition, step by step. Write formulas in LaTeX. The "
        f"answer is {several}: {kind}.{unit} End with: So the final answer is \\boxed{{answer}}.\n\n"
        f"Problem: {doc['question']}\n\nSolution:"
    )


def scores(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """exact_match: the last box holds the answer as the harness's MATH compares it; several answers in any order."""
    box = last_boxed_only_string(results[0])
    if box is None or not box.startswith("\\boxed"):
        return {"exact_match": 0.0}
    said, wanted = remove_boxed(box), ",".join(doc["final_answer"])
    if not doc.get("is_multiple_answer"):
        return {"exact_match": float(is_equiv(_bare(said), _bare(wanted)))}
    left, found = _split(said), _split(wanted)
    for answer in found:
        match = next((each for each in left if is_equiv(each, answer)), None)
        if match is None:
            return {"exact_match": 0.0}
        left.remove(match)
    return {"exact_match": float(not left)}


def _bare(answer: str) -> str:
    return answer.strip().strip("$").strip()


def _split(answers: str) -> list[str]:
    """Answers between commas, but not those inside brackets."""
    parts, depth = [""], 0
    for character in answers:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [_bare(part) for part in parts]
