"""The tokenizer that `condense train` makes: text round-trips, in pieces too; digits and newlines stand alone."""

import pytest
from transformers import AutoTokenizer

from condense.train import train_tokenizer

SAMPLES = [
    "The number of the quiet bridge is 4821.\n",
    "  two  spaces,\ttab, trailing \n\n\nthree newlines",
    "Ünïcödé “quotes” … 漢字 🎉 \u2028 \r\n end",
    "def f(x):\n    return x ** 2  # 10,000\n",
    " ",
    "",
]


def _ids(tokenizer, text):
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("sample", SAMPLES)
def test_text_round_trips(tokenizer, sample):
    assert tokenizer.decode(_ids(tokenizer, sample)) == sample


def test_digits_and_newlines_stand_alone(tokenizer):
    texts = [tokenizer.decode([index]) for index in range(2, len(tokenizer))]
    assert all(text in ("\n", "0") or len(text) == 1 for text in texts if "\n" in text or any(map(str.isdigit, text)))
    assert [tokenizer.decode([index]) for index in _ids(tokenizer, "is 4821.")][-6:] == [" ", *"4821."]


def test_special_tokens_and_reload(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.padding_side == "left"
    assert again.bos_token_id == again.eos_token_id != again.pad_token_id
    batch = ["one", "one two\n12"]
    assert again(batch, padding=True)["input_ids"] == tokenizer(batch, padding=True)["input_ids"]
    assert again("one")["input_ids"][0] == again.bos_token_id


def test_a_vocabulary_without_room_is_refused():
    with pytest.raises(ValueError, match=r"vocab_size: wanted at least 258 .*, got 257"):
        train_tokenizer(["text"], vocab_size=257)
