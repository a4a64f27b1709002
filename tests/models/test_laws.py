"""Every way of reading a text is the same function: Recall, entries in fewer bits, matched biases, a method per layer;
and how layers are named.
"""

import json
import logging
import re

import pytest
import torch
from grids import grid
from models import tiny
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, StaticCache

import condense
from condense import DGA, LCA, Dense, Recall, StreamingLLM
from condense.models import condensed_layers
from condense.models.inspect import inspect

RECALL = Recall(group_size=4, window=8, num_recall=2)
WINDOW = StreamingLLM(sink=2, window=9)
# windows and groups of several sizes beside each other; layers that stay stock, and layers that are dense by a method
CHOICES = {
    "recall-cca-window": ("llama", {1: RECALL, "0": tiny.STREAMING_6, "rest": WINDOW}),
    "dense-recall-dga": ("llama", {0: Dense(), 2: DGA(group_size=3, gamma=0.5, window=5), "rest": RECALL}),
    "recall-host-stock": ("gpt2", {"0-1": RECALL.replace(store="host", slots=3, group_size=6)}),
    "latents": ("deepseek_v3", {"-1": LCA(group_size=4, window=8), 0: RECALL.replace(window=5), "rest": Dense()}),
}
CASES = CHOICES | {
    "cca": ("llama", tiny.CCA),
    "streaming-6": ("qwen3", tiny.STREAMING_6),
    "dga": ("llama", tiny.DGA),
    "one-layer": ("gpt2", {1: tiny.STREAMING}),
    "sliding": ("qwen2-mixed", {0: tiny.STREAMING_6}),
    "recall": ("llama", RECALL),
    "recall-4-drop": ("gpt2", RECALL.replace(index_bits=4, num_recall=3, unchosen="drop")),
    "recall-16-bits": ("deepseek_v2", RECALL.replace(index_bits=16, window=5)),
    "recall-share-matched": ("llama", RECALL.replace(num_recall=0.3, key_pooling="weighted", rep_bias="matched")),
    "recall-store-and-entries-4": ("deepseek_v2", RECALL.replace(store_bits=4, entry_bits=4)),
    "recall-store-8-host": ("llama", RECALL.replace(store_bits=8, store="host", slots=3)),
    "cca-matched": ("deepseek_v2", condense.CCA(group_size=4, window=8, rep_bias="matched")),
    "lca-matched-entries-4": ("llama", LCA(group_size=4, window=6, rep_bias="matched", entry_bits=4)),
    "dga-matched": ("llama", DGA(group_size=4, gamma=0.3, window=5, rep_bias="matched")),
}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "three-beams": {"num_beams": 3, "num_return_sequences": 2},
    "three-samples": {"do_sample": True, "num_return_sequences": 3},
    "chunks-of-padding": {"prefill_chunk_size": 4},
    "token-by-token": {"prefill_chunk_size": 1},
}
ROWS = [tiny.tokens(1, n, seed=n)[0] for n in (39, 26, 32)]
IDS, MASK = tiny.left_padded(ROWS)


@pytest.fixture(params=CASES.values(), ids=CASES)
def model(request):
    name, choice = request.param
    return condense.apply(tiny.model(name), choice)


def _cannot_move_rows(model):
    return any(isinstance(m, Recall) and m.store == "host" for m in condensed_layers(model).values())


def _generate(model, **kwargs):
    torch.manual_seed(3)
    return tiny.generate(model, IDS, attention_mask=MASK, **kwargs)


@grid(18, "model", model=CASES, static={"growing": False, "static": True})
def test_full_forward_chunks_and_steps_agree(model, static):
    ids = tiny.tokens()
    full = tiny.logits(model, ids)
    for sizes in (tiny.CHUNKS, (17, *[1] * 44)):
        cache = StaticCache(model.config, max_cache_len=tiny.LENGTH) if static else None
        torch.testing.assert_close(tiny.in_chunks(model, ids, sizes, cache), full, **tiny.exact(model))


@grid(18, "model", model=CASES, t=[1, 12, 40])
def test_a_later_token_leaves_earlier_logits_bit_equal(model, t):
    ids = tiny.tokens()
    changed = ids.clone()
    changed[:, t] = (changed[:, t] + 1) % tiny.VOCAB
    before, after = tiny.logits(model, ids), tiny.logits(model, changed)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t], after[:, t])


@pytest.mark.parametrize("model", CHOICES.values(), ids=CHOICES, indirect=True)
def test_every_layer_counts_every_token_and_inspect_reports_each_by_its_method(model):
    length, held = 50, condensed_layers(model)
    cache = tiny.filled(model, tiny.tokens(1, length))
    assert [layer.get_seq_length() for layer in cache.layers] == [length] * tiny.NUM_LAYERS
    assert {i: layer.method for i, layer in enumerate(cache.layers) if hasattr(layer, "method")} == held
    for i, report in enumerate(inspect(model, held, length)):
        assert report.method == held.get(i)
        others = {j: method for j, method in held.items() if j != i}
        assert (report in inspect(model, others, length)) == (i not in held)
        assert i not in held or report == inspect(model, {i: held[i]}, length)[i]


@grid(8, "model", model=CASES, static={"growing": False, "static": True})
def test_right_padding_and_holes(model, static):
    ids = tiny.tokens(2, 50)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[0, 9:13] = mask[0, 30:33] = mask[1, :6] = mask[1, 17:20] = mask[1, 40] = 0
    cache = StaticCache(model.config, max_cache_len=64) if static else None
    got = tiny.in_chunks(model, ids, (17, 1, 1, 1, 12, *[1] * 18), cache, mask=mask)
    for row, real, out in zip(ids, mask.bool(), got, strict=True):
        torch.testing.assert_close(out[real], tiny.logits(model, row[None, real])[0], **tiny.exact(model))


@grid(12, "model", model=CASES, mode=MODES)
def test_static_and_growing_caches_give_the_tokens_of_none(model, mode):
    if "num_beams" in mode and _cannot_move_rows(model):
        with pytest.raises(ValueError, match=r"beams.*store='device'"):
            _generate(model, **mode)
        return
    want = _generate(model, **mode, **({} if "prefill_chunk_size" in mode else {"use_cache": False}))
    assert torch.equal(_generate(model, **mode), want)
    assert torch.equal(_generate(model, cache_implementation="static", **mode), want)


@grid(4, "model", model=CASES)
def test_graph_decoder_gives_the_tokens_of_generate(model):
    decoder = condense.GraphDecoder(model, batch_size=3, max_length=60)
    others = tiny.tokens(3, 44, seed=8)
    for chunk in (None, 7):
        assert torch.equal(decoder.generate(IDS, MASK, max_new_tokens=tiny.NEW, chunk=chunk), _generate(model))
        want = tiny.generate(model, others)
        assert torch.equal(decoder.generate(others, max_new_tokens=tiny.NEW, chunk=chunk), want)


@grid(5, "model", model=CASES)
def test_tokens_that_are_taken_back(model):
    ids = torch.cat([ROWS[0][:13]] * 3)[None]
    assert torch.equal(tiny.generate(model, ids, prompt_lookup_num_tokens=10), tiny.generate(model, ids))


def test_saved_loaded_and_restored(model, tmp_path, request):
    ids, name, held = tiny.tokens(), request.node.callspec.params["model"][0], condensed_layers(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert condensed_layers(loaded) == held
    # loaded, the rotary embeddings' buffers are in float32 still
    torch.testing.assert_close(tiny.logits(loaded.double(), ids), tiny.logits(model, ids), **tiny.exact(model))
    assert torch.equal(tiny.logits(condense.restore(model), ids), tiny.logits(tiny.model(name), ids))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_brings_the_methods_of_its_base(tmp_path):
    choice = {1: RECALL, "0": tiny.STREAMING_6, "rest": WINDOW}
    settings = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    tuned = get_peft_model(condense.apply(tiny.model("llama"), choice), settings).double().eval()
    torch.testing.assert_close(
        tiny.in_chunks(tuned, tiny.tokens(), tiny.CHUNKS), tiny.logits(tuned, tiny.tokens()), **tiny.EXACT
    )
    tuned.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny.model("llama"), tmp_path)
    assert condensed_layers(loaded) == {0: tiny.STREAMING_6, 1: RECALL, 2: WINDOW}


def test_use_is_undone_and_nests():
    model, ids = condense.apply(tiny.model("llama"), tiny.CCA), tiny.tokens()
    before = tiny.logits(model, ids)
    with condense.use(model, {2: RECALL, "rest": WINDOW}):
        assert condensed_layers(model) == {0: WINDOW, 1: WINDOW, 2: RECALL}
        assert not torch.equal(tiny.logits(model, ids), before)
        with condense.use(model, {"0": Dense()}):
            assert condensed_layers(model) == {0: Dense(), 1: WINDOW, 2: RECALL}
    assert torch.equal(tiny.logits(model, ids), before)


NAMED = {
    "indices": {0: RECALL, 1: tiny.CCA, 2: tiny.CCA},
    "negative": {-3: RECALL, "-2--1": tiny.CCA},
    "rest": {0: RECALL, "rest": tiny.CCA},
    "rest-first": {"rest": tiny.CCA, 0: RECALL},
    "text": {"0": RECALL, "1-2": tiny.CCA},
    "open-range": {"1--1": tiny.CCA, "0": RECALL},
    "list": {(0,): RECALL, range(1, 3): tiny.CCA},
    "empty-rest": {0: RECALL, "1,2": tiny.CCA, "rest": Dense()},
    "dicts-and-text": {0: RECALL.to_dict(), "rest": "cca:group_size=4,window=8"},
    "one-text": "recall:group_size=4,window=8,num_recall=2@-3+cca:group_size=4,window=8@rest",
}


@pytest.mark.parametrize("choice", NAMED.values(), ids=NAMED)
def test_ways_to_name_the_same_layers(choice):
    assert condensed_layers(condense.apply(tiny.model("llama"), choice)) == {0: RECALL, 1: tiny.CCA, 2: tiny.CCA}


def test_an_allocation_in_a_file(tmp_path):
    model = condense.apply(tiny.model("llama"), NAMED["rest"])
    path = tmp_path / "allocation.json"
    path.write_text(json.dumps(model.config.condense))
    again = condense.apply(tiny.model("llama"), f"@{path}")
    assert condensed_layers(again) == condensed_layers(model)
    assert again.config.condense == model.config.condense


def test_sliding_windows_are_no_part_of_the_rest(caplog):
    model = tiny.model("qwen2-mixed")
    with caplog.at_level(logging.WARNING, "condense"):
        condense.apply(model, {"rest": tiny.CCA})
    assert condensed_layers(model) == {0: tiny.CCA}
    assert "layers [1, 2] have a sliding window and stay as they are" in caplog.text


def test_layers_that_are_not_named_are_logged(caplog):
    with caplog.at_level(logging.WARNING, "condense"):
        condense.apply(tiny.model("llama"), {1: RECALL})
    assert "layers [0, 2] are not named and stay as they are" in caplog.text


TWICE = "layer 1 is named twice, for Recall(group_size=4, window=8, num_recall=2) and CCA(group_size=4, window=8)"
BAD = {
    "twice": ("llama", {1: RECALL, "0-2": tiny.CCA}, TWICE),
    "twice-in-one": ("llama", {"1,0-2": RECALL}, "layer 1 is named twice"),
    "too-high": ("llama", {3: RECALL}, "layers must be indices from 0 to 2, got 3"),
    "too-high-range": ("llama", {"0-99999999999": RECALL}, "layers must be indices from 0 to 2, got 99999999999"),
    "too-low": ("llama", {"-4": RECALL}, "layers must be indices from 0 to 2, got -4"),
    "backwards": ("llama", {"2-1": RECALL}, "layers: a range must go from its lower to its higher end, got '2-1'"),
    "backwards-from-the-last": ("llama", {"2--2": RECALL}, "from its lower to its higher end, got '2--2'"),
    "words": ("llama", {"all": RECALL}, "layers must look like 2-31 or 0,4-7, got 'all'"),
    "no-index": ("llama", {None: RECALL}, "layers must be named by an index, by several or as text, got None"),
    "none": ("llama", {}, "method must name at least one layer, got an empty mapping"),
    "no-method": ("llama", {0: None}, "method must be a condense method such as"),
    "sliding": ("qwen2-mixed", {"0-1": RECALL}, "layer 1 has a sliding window and cannot be condensed; full are [0]"),
    "latents": ("deepseek_v3", {0: RECALL, 1: tiny.SELECT}, "layer 1: DGA("),
    "text-of-several": ("llama", "recall@0+cca", "each of several must name its layers, got 'cca'; write cca@rest"),
    "text-twice": ("llama", "recall@0+cca@0", "layers 0 are named twice, for Recall() and cca@0"),
    "no-file": ("llama", "@missing.json", "method: no such file: missing.json"),
}


@pytest.mark.parametrize(("name", "choice", "said"), BAD.values(), ids=BAD)
def test_bad_choices_change_nothing(name, choice, said):
    model = condense.apply(tiny.model(name), tiny.CCA, layers=[0])
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        condense.apply(model, choice)
    assert "\n" not in str(error.value)
    assert condensed_layers(model) == {0: tiny.CCA}


def test_layers_beside_a_mapping():
    with pytest.raises(ValueError, match="layers must be left out where method names them"):
        condense.apply(tiny.model("llama"), {0: RECALL}, layers=[0])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no JSON", "wanted JSON, got "),
        ('{"layers": []}', 'must be {"methods": [{"method": {...}, "layers": [...]}, ...]}'),
        ('{"methods": [{"method": "cca", "layers": [0]}, {"method": "lca", "layers": [0]}]}', "layer 0 is named twice"),
        ('{"methods": [{"method": "mystery", "layers": [0]}]}', "method must be one of"),
    ],
    ids=["json", "form", "twice", "method"],
)
def test_bad_files(tmp_path, content, said):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(said)):
        condense.apply(tiny.model("llama"), f"@{path}")
