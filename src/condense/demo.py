"""The bundled model, and the bundled long text with numbers hidden in it."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from condense.evaluate.compare import Prompt
from condense.tasks.passkeys import Key, question_prompt

# folder of the bundled model and its tokenizer
FOLDER = Path(__file__).parent / "assets" / "demo"
# the novel of `demo_text` as one document with hidden numbers, training data for a try-out
TEXT_FILE = FOLDER / "text.jsonl"


@dataclass(frozen=True)
class DemoText:
    """A long text and the numbers hidden in it.

    text: about 3,900 tokens of the bundled tokenizer. keys: the hidden numbers, in the order in which to ask for them.
    """

    text: str
    keys: tuple[Key, ...]


def demo_model(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The bundled model with stock attention, in evaluation mode on the CPU, and its tokenizer. No network.

    A Llama of 11.5M parameters that reads up to 8,192 tokens of English and finds numbers hidden in them, with
    dense attention and with ``CCA(group_size=16, window=256, summary="streaming", key_pooling="select",
    rep_bias="log_size")``; the recipe ``demo_model`` of `condense train` made it.

    dtype: of the weights, which are stored in bfloat16.
    """
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


def demo_text() -> DemoText:
    """The bundled text: the opening of a public-domain novel that the model was not trained on."""
    content = json.loads(TEXT_FILE.read_text(encoding="utf-8"))
    return DemoText(content["text"], tuple(Key(*key) for key in content["keys"]))


def demo_prompt() -> Prompt:
    """`demo_text` with its questions and right answers, ready for `condense.evaluate.compare`."""
    demo = demo_text()
    questions = tuple(question_prompt(key, "question") for key in demo.keys)
    return Prompt(demo.text, questions, tuple(key.number for key in demo.keys))
