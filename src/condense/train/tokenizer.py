"""A byte-level BPE tokenizer that never merges across lines, words or digits."""

import sys
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096, max_positions: int = 4096) -> PreTrainedTokenizerFast:
    """Learn a tokenizer from texts; every text survives encoding and decoding unchanged.

    Each newline and each digit is a token of its own, so the encodings of pieces that end at a newline are those of the
    whole, and a number is read digit by digit. One token, ``<|endoftext|>``, is bos and eos in one.

    texts: to learn from. vocab_size: entries, special tokens included; at least 258 (256 bytes, 2 special
    tokens). max_positions: the length that the tokenizer warns beyond.
    Raises ValueError if ``vocab_size`` is below 258.
    """
    if vocab_size < 258:
        raise ValueError(f"vocab_size: wanted at least 258 (256 bytes, 2 special tokens), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), behavior="isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT, PADDING],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=sys.stderr.isatty(),
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A $B",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        padding_side="left",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
