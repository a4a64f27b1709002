"""A model of lm-evaluation-harness for its own command line: Hugging Face's, condensed by a method."""

from typing import Any

from lm_eval.models.huggingface import HFLM

from condense.evaluate.harness.run import check_choice
from condense.models import apply, choice_from_text


class CondensedLM(HFLM):
    """The harness's ``hf`` with one argument more, as in ``--model_args pretrained=DIR,condense=recall-host``.

    condense: a method as text, or methods by layer. All other arguments are the harness's.
    Raises ValueError as `condense.apply`, and for batches of a method that reads whole prompts at once.
    """

    def __init__(self, pretrained: Any, condense: str = "", batch_size: int | str = 1, **arguments: Any) -> None:
        if not condense:
            raise ValueError("condense: wanted a method, as in pretrained=DIR,condense=recall-host, got none")
        choice = choice_from_text(condense)
        check_choice(condense, choice, batch_size)
        super().__init__(pretrained, batch_size=batch_size, **arguments)
        apply(self.model, choice)
