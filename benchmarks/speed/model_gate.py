"""Checking whole models before they are timed: reading a text at once, in pieces and by token must give equal logits.

With low precision they are equal only up to rounding. The bound, in root mean square: twice the sum of two distances,
plus one unit in the last place. The distances: between the stock model's logits read at once and in pieces, and between
the condensed logits before and after every embedding is moved by one unit in the last place.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from condense.caches import CACHE
from condense.models import GraphDecoder, MethodChoice, as_steps, methods_of, use
from speed.budget import Verdict


class ModelGate:
    """Checks one model on a short text of random tokens per method.

    If a method reads prompts otherwise than steps, its steps are checked, against a prompt that is read as they are.
    """

    def __init__(self, model: PreTrainedModel, method: MethodChoice, seed: int) -> None:
        self.model, self.method = model, as_steps(method)
        methods = methods_of(method)
        chunk = max(each.layout.rule.chunk for each in methods)
        # long enough to leave the window, with groups that end in each piece and in the steps, and to choose from
        self.steps = chunk + 3
        length = max(each.layout.rule.window or 0 for each in methods) + 4 * chunk + self.steps
        quotas = [each.layout.choice.quota for each in methods if each.layout.choice is not None]
        length += max((quota.most * chunk for quota in quotas if quota.part == quota.of), default=0)
        self.ids = random_tokens(model, length, seed)

    def check(self, compile: bool | None, *, condensed: bool = True) -> Verdict | None:
        """Compare the logits read at once with those in pieces, or by a graph if ``compile`` is not None.

        condensed: under the method; else of the stock model. None for methods that read prompts differently from steps
        by definition.
        """
        if condensed and any(method.layout.lookahead for method in methods_of(self.method)):
            return None
        dense = _rms(self._at_once() - self._in_pieces())
        with use(self.model, self.method) if condensed else contextlib.nullcontext():
            want = self._at_once()
            moved = _rms(want - self._at_once(nudged=True))
            got = self._in_pieces() if compile is None else self._by_graph(compile)
        bound = 2 * (dense + moved) + torch.finfo(self.model.dtype).eps * _rms(want)
        return Verdict(_rms(got - want) / bound)

    def _at_once(self, *, nudged: bool = False) -> Tensor:
        embeddings = self.model.get_input_embeddings()(self.ids)
        if nudged:
            generator = torch.Generator(embeddings.device).manual_seed(0)
            signs = torch.randn(embeddings.shape, generator=generator, device=embeddings.device).sign()
            embeddings = embeddings + embeddings * signs.to(embeddings.dtype) * torch.finfo(embeddings.dtype).eps
        out = self.model(inputs_embeds=embeddings, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].double()

    def _in_pieces(self) -> Tensor:
        """Two pieces of the text, then one token at a time."""
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        prompt = self.ids.shape[1] - self.steps
        for piece in self.ids.split([prompt // 2 + 1, prompt - prompt // 2 - 1, *[1] * self.steps], dim=1):
            logits = self.model(piece, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].double()

    def _by_graph(self, compile: bool) -> Tensor:
        prompt = self.ids.shape[1] - self.steps
        decoder = GraphDecoder(self.model, batch_size=1, max_length=self.ids.shape[1] + 1, compile=compile)
        logits = decoder.prefill(self.ids[:, :prompt], chunk=prompt // 2 + 1)
        for step in range(prompt, self.ids.shape[1]):
            logits = decoder.step(self.ids[:, step])
        return logits.double()


def random_tokens(model: PreTrainedModel, length: int, seed: int) -> Tensor:
    """``[1, length]`` on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (1, length), generator=generator).to(model.device)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
