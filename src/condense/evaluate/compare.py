"""The same prompt under several attention methods: answers, time to first token, time per token, cache bytes."""

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from condense.caches import CACHE, CondensedCacheLayer, cache_nbytes
from condense.config import check_int
from condense.methods import Dense
from condense.models import MethodChoice, attention_layers, check_stock, chosen_methods, use
from condense.models.families import check_learned_positions


@dataclass(frozen=True)
class Prompt:
    """A text and questions that are asked after it; without questions the model continues the text.

    expected: the right answers, one per question, or empty. chat: text and question go into the tokenizer's template.
    """

    text: str
    questions: Sequence[str] = ()
    expected: Sequence[str] = ()
    chat: bool = False


@dataclass(frozen=True)
class Outcome:
    """One method, or one choice of methods by layer, on one prompt, greedy, batch 1.

    first_token_s: reading the text and the first question up to its first new token. token_s: median over the
    further tokens. cache_bytes: allocated after the text and one token more. host_bytes: the part of these bytes that
    ``Recall(store="host")`` keeps in host memory; on a CPU, what it would keep there beside a GPU. correct: answers
    that begin with the expected one, None if none is expected.
    """

    method: MethodChoice
    text_tokens: int
    answers: list[str]
    correct: int | None
    first_token_s: float
    token_s: float | None
    cache_bytes: int
    host_bytes: int

    @property
    def device_bytes(self) -> int:
        """Bytes of the cache on the device."""
        return self.cache_bytes - self.host_bytes


class Stopwatch(StoppingCriteria):
    """A stopping criterion that notes when each token was made, without waiting for a CUDA device, and never stops."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []  # seconds, or events on CUDA
        now(device)  # waits for queued work, so that the first mark is of now
        self.note()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Note one more token, and stop no row."""
        self.note()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def note(self) -> None:
        """Note one more token, which is made when the device has done what it was given so far."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            self._marks.append(torch.cuda.current_stream(self._device).record_event(event))
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds to the first token and of each further one."""
        now(self._device)
        on_device = self._device.type == "cuda"
        return [a.elapsed_time(b) / 1e3 if on_device else b - a for a, b in itertools.pairwise(self._marks)]


def now(device: torch.device) -> float:
    """Seconds, once all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[MethodChoice],
    prompt: Prompt,
    *,
    max_new_tokens: int = 16,
    on_step: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Read the text once per method, then answer each question on a copy of that cache.

    model: a causal LM with stock attention, which it has afterwards too. methods: layers with Dense and layers that are
    left out are stock. on_step is called after the text and after every answer.
    Raises ValueError for an unsupported or condensed model, an empty text, sizes below 1, expected answers that do not
    match the questions, a prompt longer than the model's learned positions, and as `chat_message`.
    """
    check_int("max_new_tokens", max_new_tokens, 1)
    attention_layers(model)
    check_stock(model)
    if prompt.expected and len(prompt.expected) != len(prompt.questions):
        raise ValueError(
            f"expected must hold one answer per question, got {len(prompt.expected)} for {len(prompt.questions)}"
        )
    text_part, question_parts = prompt.text, prompt.questions
    if prompt.chat:
        messages = [chat_message(tokenizer, prompt.text, question) for question in prompt.questions or [""]]
        text_part, question_parts = messages[0][0], [question for _, question in messages]
    text = encode(tokenizer, text_part, model, special=not prompt.chat)
    questions = [encode(tokenizer, question, model, special=False) for question in question_parts]
    longest = text.shape[1] + max((q.shape[1] for q in questions), default=0) + max_new_tokens
    check_learned_positions(model.config, "prompt and new tokens", longest)
    for method in methods:
        # untimed, so that no method's time includes loading libraries and compiling kernels
        with torch.no_grad(), attention_of(model, method):
            cache = DynamicCache(config=model.config)
            for ids in text[:, :64].split(32, dim=1):
                model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    own = model.generation_config
    # greedily, without beams or penalties that the model is saved with; without a pad token generate warns
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=0)
    try:
        return [_run(model, tokenizer, m, text, questions, prompt.expected, max_new_tokens, on_step) for m in methods]
    finally:
        model.generation_config = own


def chat_message(tokenizer: PreTrainedTokenizerBase, text: str, question: str = "") -> tuple[str, str]:
    """A user's message in the tokenizer's chat template, in two parts: up to the end of ``text``, and the rest.

    Raises ValueError for a tokenizer without a template, and for a template that changes the text.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("chat: the tokenizer has no chat template; leave it out")
    text = text.strip()
    message = [{"role": "user", "content": f"{text}\n\n{question.strip()}" if question else text}]
    whole = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    before, found, after = whole.partition(text)
    if not found:
        raise ValueError("chat: the tokenizer's chat template changes the text; leave it out")
    return before + found, after


def encode(tokenizer: PreTrainedTokenizerBase, text: str, model: PreTrainedModel, *, special: bool = True) -> Tensor:
    """Token ids ``[1, L]`` on the model's device. Raises ValueError if there are none or it is no UTF-8."""
    try:
        text.encode()  # fails for bytes on a command line that are no UTF-8, of which tokenizers raise a TypeError
    except UnicodeEncodeError as error:
        raise ValueError(f"text and questions must be UTF-8, got {text!r}: {error}") from error
    ids = tokenizer(text, add_special_tokens=special, return_tensors="pt").input_ids
    if ids.numel() == 0:
        raise ValueError("text and questions must hold at least one token each, got an empty one")
    return ids.to(device=model.device, dtype=torch.int64)


def attention_of(model: PreTrainedModel, choice: MethodChoice) -> AbstractContextManager[object]:
    """Condense the model as chosen for the length of a ``with`` block; layers with Dense stay stock."""
    if isinstance(choice, Mapping):
        choice = {i: method for i, method in chosen_methods(model, choice).items() if not isinstance(method, Dense)}
    return nullcontext() if isinstance(choice, Dense) or not choice else use(model, choice)


@torch.no_grad()
def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    method: MethodChoice,
    text: Tensor,
    questions: list[Tensor],
    expected: Sequence[str],
    max_new_tokens: int,
    on_step: Callable[[], None],
) -> Outcome:
    with attention_of(model, method):
        # without questions the text is continued, and generate reads its last token itself
        body = text if questions else text[:, :-1]
        cache = DynamicCache(config=model.config)
        read_s = 0.0
        if body.shape[1] > 0:
            start = now(model.device)
            model(body, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
            read_s = now(model.device) - start
        # counted after one token more: until then stock layers with a sliding window keep a whole prompt
        grown = copy.deepcopy(cache)
        model(text[:, -1:], **{CACHE: grown}, use_cache=True, logits_to_keep=1)
        cache_bytes = cache_nbytes(grown)
        host_bytes = sum(layer.host_bytes for layer in grown.layers if isinstance(layer, CondensedCacheLayer))
        del grown
        on_step()
        answers, first_s, further_s = [], [], []
        for question in questions or [text[:, -1:]]:
            watch = Stopwatch(model.device)
            ids = torch.cat([body, question], dim=1)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{CACHE: copy.deepcopy(cache)},
                use_cache=True,
                max_new_tokens=max_new_tokens,
                stopping_criteria=StoppingCriteriaList([watch]),
            )
            answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
            first, *further = watch.seconds()
            first_s.append(first)
            further_s.extend(further)
            on_step()
    correct = sum(a.startswith(e) for a, e in zip(answers, expected, strict=True)) if expected else None
    return Outcome(
        method=method,
        text_tokens=text.shape[1],
        answers=answers,
        correct=correct,
        first_token_s=read_s + first_s[0],
        token_s=statistics.median(further_s) if further_s else None,
        cache_bytes=cache_bytes,
        host_bytes=host_bytes,
    )
