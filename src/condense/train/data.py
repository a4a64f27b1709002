"""Training sequences as a dataset: item i depends on the seed and on i alone, so that resuming is exact."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from condense.tasks import FORMS, SequenceBuilder
from condense.train.config import PhaseConfig

# model types for which transformers makes masks without positions, so that dense attention reads across documents
_ACROSS = ("afmoe", "biogpt", "gpt_oss", "opt")
_SHORTEST = 256  # tokens of a text with hidden numbers that ends early


def mixes_documents(config: PreTrainedConfig) -> str | None:
    """The reason, as a clause, why such a model would read across packed documents; None if all layers begin anew where
    positions do, with dense and with condensed attention.
    """
    text = config.get_text_config(decoder=True)
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=text).layers):
        return "in which layers that are not attention carry a state from one document to the next"
    return "whose dense attention reads across documents in transformers" if text.model_type in _ACROSS else None


class TrainingSequences(Dataset[dict[str, torch.Tensor]]):
    """The sequences of one phase, in the order in which they are trained on.

    An item has ``input_ids`` (int64) and ``loss_weights`` (float32), both ``[L]``: the weight of a token as a target,
    which is 0 for the first one (nothing predicts it), ``answer_weight`` in answers and 1 elsewhere. If documents are
    packed it has ``position_ids`` too (int64 ``[L]``), which begin anew at each, whose first token has weight 0.

    builders: of the phase's length, one for each corpus. weights: how often a sequence is drawn from each, positive, of
    any sum; empty for a single corpus. phase: sets the number of sequences and their tasks. seed: of this phase.
    """

    def __init__(
        self, builders: Sequence[SequenceBuilder], phase: PhaseConfig, seed: tuple[int, ...],
        weights: Sequence[float] = (),
    ) -> None:  # fmt: skip
        self._builders = builders
        self._shares = np.array(weights) / sum(weights) if weights else None
        self._phase = phase
        self._seed = seed

    def __len__(self) -> int:
        return self._phase.steps * self._phase.batch_size

    def _drawn(self, rng: np.random.Generator) -> SequenceBuilder:
        """The builder of one corpus, drawn by weight."""
        return self._builders[0 if self._shares is None else rng.choice(len(self._builders), p=self._shares)]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng([*self._seed, index])
        length = self._builders[0].length
        weights = torch.ones(length, device="cpu")
        starts = np.zeros(1, np.int64)
        if rng.random() < self._phase.task_share:
            fewest, most = self._phase.keys
            count = int(rng.integers(fewest, most + 1))
            form = FORMS[int(rng.integers(len(FORMS)))]
            varied = self._phase.varied_share > 0 and rng.random() < self._phase.varied_share
            opening = self._phase.first_share > 0 and rng.random() < self._phase.first_share
            size = length
            if length > _SHORTEST and self._phase.short_share > 0 and rng.random() < self._phase.short_share:
                # drawn evenly on a logarithmic scale: as many from 256 to 512 tokens as from 4,096 to 8,192
                size = round(_SHORTEST * (length / _SHORTEST) ** rng.random())
                count = max(1, round(count * size / length))
            sequence = self._drawn(rng).passkeys(
                rng, count, form, shared=varied, anywhere=varied, opening=opening, size=size
            )
            for start, stop in sequence.answers:
                weights[start:stop] = self._phase.answer_weight
            ids = sequence.input_ids
            if self._phase.packed and size < length:
                others, their_starts = self._drawn(rng).documents(rng, length - size)
                ids = np.concatenate([ids[:size], others])
                starts = np.concatenate([starts, size + their_starts])
        elif self._phase.packed:
            ids, starts = self._drawn(rng).documents(rng, length)
        else:
            ids = self._drawn(rng).plain(rng)
        weights[starts] = 0
        item = {"input_ids": torch.from_numpy(ids), "loss_weights": weights}
        if self._phase.packed:
            lengths = np.diff(starts, append=len(ids))
            item["position_ids"] = torch.from_numpy(np.arange(len(ids)) - np.repeat(starts, lengths))
        return item
