"""Data to train and evaluate models on: text corpora, and numbers hidden in text."""

from condense.tasks.corpus import Corpus, encode_corpus, load_corpus
from condense.tasks.documents import read_documents, read_json_lines
from condense.tasks.passkeys import (
    FORMS,
    LEAST_FOUND,
    Key,
    Words,
    draw_keys,
    hide,
    key_line,
    load_words,
    question_prompt,
)
from condense.tasks.sequences import PasskeySequence, SequenceBuilder
