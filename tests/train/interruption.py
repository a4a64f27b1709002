"""Training that stops in the middle, as if somebody had pressed Ctrl-C."""

import contextlib

import pytest

from condense.train.trainer import MixedTrainer


@contextlib.contextmanager
def interrupted_at(step):
    """Interrupts the block before this optimizer step, counted from 0; the block must not catch it."""
    stock = MixedTrainer.training_step

    def training_step(self, *args, **kwargs):
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return stock(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixedTrainer, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            yield
