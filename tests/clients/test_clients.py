"""A program that people have: a text-generation pipeline with a streamer."""

import threading

import pytest
import torch
from small_models import saved_with_tokenizer, tiny_llama
from transformers import AutoModelForCausalLM, TextIteratorStreamer, pipeline

import condense

METHOD = condense.CCA(group_size=4, window=8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saved_with_tokenizer(condense.apply(tiny_llama(), METHOD), tmp_path_factory.mktemp("model") / "tiny")


def test_a_pipeline_streams_what_generate_writes(saved):
    # padded, since the second prompt is shorter
    writer = pipeline("text-generation", model=str(saved), dtype="float32", device="cpu")
    prompts = [
        "The harbour lay quiet under the moon, and twenty-seven boats rocked at their moorings.",
        "Who goes there?",
    ]
    settings = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    texts = [each[0]["generated_text"] for each in writer(prompts, batch_size=2, **settings)]
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    for prompt, text in zip(prompts, texts, strict=True):
        inputs = writer.tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert writer.tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True) == text
    streamer = TextIteratorStreamer(writer.tokenizer, skip_prompt=True, skip_special_tokens=True)
    thread = threading.Thread(target=writer, args=(prompts[0],), kwargs={"streamer": streamer, **settings})
    thread.start()
    assert "".join(streamer) == texts[0]
    thread.join()
