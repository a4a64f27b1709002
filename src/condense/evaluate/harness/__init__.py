"""Evaluating on lm-evaluation-harness's tasks; the package lm_eval is imported only when something runs."""

from condense.evaluate.harness.report import write_report
from condense.evaluate.harness.run import Score, Settings, evaluate, saved_scores
from condense.evaluate.harness.tasks import OWN, OWN_FOLDER

__all__ = ["OWN", "OWN_FOLDER", "Score", "Settings", "evaluate", "saved_scores", "write_report"]
