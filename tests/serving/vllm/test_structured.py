"""Answers of a given form (`structured_outputs`) from condensed layers: those of generate among the same tokens."""

import re

import pytest
import torch
from small_models import condensed, prompts_of, saved_with_tokenizer, tiny_llama
from vllm.sampling_params import StructuredOutputsParams

import condense

METHODS = {
    "recall": condense.Recall(group_size=4, window=24, num_recall=6, store_bits=4),
    "exact-prompts": condense.Recall(group_size=4, window=24, num_recall=6, store_bits=4, prompt="exact"),
    "pooled": condense.LCA(group_size=4, window=24, rep_bias="log_size"),
}
CHOICES = ("red green", "red violet", "blue")
NUMBERS = 12
# what is asked for, and whether some such answer begins with a text
FORMS = {
    "choice": ({"choice": list(CHOICES)}, lambda text: any(choice.startswith(text) for choice in CHOICES)),
    "regex": ({"regex": f"[0-9]{{{NUMBERS}}}"}, lambda text: re.fullmatch(f"[0-9]{{0,{NUMBERS}}}", text)),
}
LENGTHS = (230, 31, 150)


@pytest.fixture(scope="module", params=METHODS)
def case(request, tmp_path_factory):
    """A condensed model with weights so large that prompts matter, its folder and its tokenizer."""
    # the tokenizer's end of a text: vLLM takes the model's, which by default is another token
    sizes = {"initializer_range": 0.5, "max_position_embeddings": 512, "eos_token_id": 0}
    model = condense.apply(tiny_llama(**sizes), METHODS[request.param])
    folder = saved_with_tokenizer(model, tmp_path_factory.mktemp("model"))
    return model, folder, condense.demo_model()[1]


def is_whole(form, text):
    return text in CHOICES if form == "choice" else len(text) == NUMBERS


@torch.no_grad()
def wanted(model, tokenizer, ids, form):
    """The answer of generate among the tokens with which some answer begins; then its end."""
    begins, end = FORMS[form][1], tokenizer.eos_token_id
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}

    def allowed(_, tokens):
        text = tokenizer.decode(tokens[len(ids) :])
        if is_whole(form, text):
            return [end]
        return [token for token, piece in texts.items() if token != end and piece and begins(text + piece)]

    row = torch.tensor([ids])
    fixed = {"do_sample": False, "eos_token_id": end, "pad_token_id": 0, "max_new_tokens": 40}
    made = model.generate(row, attention_mask=torch.ones_like(row), prefix_allowed_tokens_fn=allowed, **fixed)
    return made[0, len(ids) :].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_answers_of_a_form(engine, case, form):
    model, folder, tokenizer = case
    prompts = prompts_of(LENGTHS)
    want = [wanted(model, tokenizer, ids, form) for ids in prompts]
    settings = {**condensed(model, max_num_batched_tokens=48), "skip_tokenizer_init": False}
    started = engine(folder, **settings)
    for _ in range(2):
        params = StructuredOutputsParams(**FORMS[form][0])
        outputs = started.generate(prompts, 40, structured_outputs=params, ignore_eos=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == want
        assert all(is_whole(form, output.outputs[0].text) for output in outputs)
    assert len({tuple(row) for row in want}) > 1
