"""Evaluating on lm-evaluation-harness's tasks; the package lm_eval is imported only when something runs."""

from condense.evaluate.harness.run import Score, Settings, evaluate
from condense.evaluate.harness.tasks import OWN, OWN_FOLDER, check_names
