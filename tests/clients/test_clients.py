"""Programs that people have: a text-generation pipeline with a streamer, and embeddings of long documents."""

import threading

import pytest
import torch
from small_models import saved_with_tokenizer, tiny_llama
from transformers import AutoModel, AutoModelForCausalLM, TextIteratorStreamer, pipeline

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


@torch.no_grad()
def test_embeddings_of_long_documents_by_the_last_hidden_state(saved):
    encoder = AutoModel.from_pretrained(saved, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    long, short = (torch.randint(5, 300, (1, n), generator=generator) for n in (400, 150))

    def embed(ids, mask=None):
        return encoder(ids, attention_mask=mask, use_cache=False).last_hidden_state[:, -1]

    padded = torch.cat([torch.zeros(1, 250, dtype=torch.int64), short], dim=1)
    mask = torch.cat(
        [torch.ones(1, 400, dtype=torch.int64), torch.cat([torch.zeros(1, 250), torch.ones(1, 150)], 1).long()]
    )
    both = embed(torch.cat([long, padded]), mask)
    torch.testing.assert_close(both[:1], embed(long), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both[1:], embed(short), rtol=1e-4, atol=1e-5)
    # in pieces, through a cache that stays small
    cache = None
    for part in long.split(90, dim=1):
        output = encoder(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
    torch.testing.assert_close(output.last_hidden_state[:, -1], both[:1], rtol=1e-4, atol=1e-5)
    assert condense.cache_nbytes(cache) < 400 * 2 * 2 * 16 * 4 / 2, "half of a dense cache's bytes"
    # the far beginning is heard, through entries
    changed = long.clone()
    changed[0, :40] = torch.randint(5, 300, (40,), generator=generator)
    assert not torch.allclose(embed(changed), both[:1], rtol=1e-4, atol=1e-5)
