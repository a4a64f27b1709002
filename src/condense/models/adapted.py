"""The mark of a model that was adapted to pooling, and the warning for models without it.

``config.condense_adapted`` names the methods that the weights were adapted to, in the form of ``config.condense``;
`condense train` writes it.
"""

from collections.abc import Mapping

from transformers import PreTrainedModel
from transformers.utils import logging

from condense.methods import DGA
from condense.methods.grouped import GroupPooling
from condense.models.choice import MethodChoice, methods_of

logger = logging.get_logger(__name__)
ADAPTED = "condense_adapted"


def warn_of_pooling(model: PreTrainedModel, choice: MethodChoice) -> None:
    """Log, once per process, that one method pools a model whose configuration does not say that it was adapted.

    Nothing is logged for a model in training mode, nor if methods are named layer by layer, by indices, as `condense
    calibrate` does. Layers given as text, such as "2-31", count as one method.
    """
    adapted = model.training or getattr(model.config.get_text_config(decoder=True), ADAPTED, None)
    by_layer = isinstance(choice, Mapping) and not all(isinstance(layers, str) for layers in choice)
    method, *others = methods_of(choice)
    if isinstance(method, GroupPooling | DGA) and not (others or by_layer or adapted):
        logger.warning_once(
            "condense: the model's configuration does not say that it was adapted to pooling (CCA, LCA, DGA), without "
            "which it loses text behind the window: use 'recall-host' or 'recall-device', which need no training, "
            "adapt it (condense train adapt), or, if that was done elsewhere, set model.config.condense_adapted = "
            "model.config.condense before it is saved"
        )
