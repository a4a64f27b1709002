"""On a CUDA device (collected only there): graphs, also those of plain generate, give the growing cache's tokens."""

import threading

import pytest
import torch
from gpu.running import SELECT, agree, condensed, generate, methods, no_waiting, padded
from models import small, tiny
from transformers import CompileConfig

import condense
from condense.models import fused, prompts, replay, streams
from condense.models.families import has_eager_experts

METHODS = methods("cca", "streaming", "entries-4", "streaming-llm", "dga")
RECALL = condense.Recall(group_size=16, window=48, num_recall=2)
# one method in all layers; a method per layer, and layers that stay stock in the same cache
MIXED = {
    "recall-host-cca-window": (
        "llama",
        {0: RECALL.replace(store="host"), 1: METHODS["streaming"], "rest": METHODS["streaming-llm"]},
    ),
    "dense-recall-dga": ("llama", {"1": condense.Dense(), "2": METHODS["dga"], "rest": RECALL}),
    "recall-stock": ("llama", {-1: RECALL}),
    "latents": ("deepseek_v3", {0: condense.LCA(window=64), -1: RECALL, "rest": condense.Dense()}),
}
CHOICES = {name: ("llama", method, 300) for name, method in METHODS.items()}
CHOICES |= {"one-layer": ("llama", {1: METHODS["cca"]}, 300), "stock": ("llama", None, 100)}
CHOICES |= {name: (*case, 100) for name, case in MIXED.items()}
EXACT = RECALL.replace(prompt="exact", store_bits=4)
TURNS = {"stock": None, "cca": METHODS["cca"], "exact": EXACT, "exact-host": EXACT.replace(store="host")}
FEW = condense.CCA(group_size=4, window=8)
HYBRIDS = dict.fromkeys(("gemma2", "gemma3_text", "gpt_oss", "llama4_text", "qwen3_next", "lfm2", "jamba"), FEW)
HYBRIDS |= {"qwen3_5_text": FEW, "nemotron_h": FEW, "kimi_linear": condense.LCA(group_size=4, window=8)}


@pytest.fixture
def graphs(monkeypatch):
    found, capture = [], replay.ReplayedForward._capture

    def spy(self, *args):
        found.append(capture(self, *args))
        return found[-1]

    monkeypatch.setattr(replay.ReplayedForward, "_capture", spy)
    return found


@pytest.mark.parametrize(("name", "choice", "steps"), CHOICES.values(), ids=CHOICES)
def test_graph_of_a_padded_batch_and_of_a_second_prompt(name, choice, steps):
    model = condensed(choice, name)
    decoder = condense.GraphDecoder(model, batch_size=2, max_length=512)
    for chunk, prompt, real in ((None, *padded()), (64, tiny.tokens(2, 130, seed=9).cuda(), None)):
        got = tiny.decoded(decoder, prompt, real, max_new_tokens=steps, chunk=chunk)
        real = torch.ones_like(prompt) if real is None else real
        agree(got, generate(model, prompt, real, steps, cache_implementation="dynamic"), model, real)
    assert decoder._graph is not None


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3"])
def test_prompts_and_steps_with_compiled_norms_and_rotations(name, graphs, monkeypatch):
    model, (ids, mask) = condensed(FEW, name), padded()
    want = generate(model, ids, mask, 60, cache_implementation="dynamic")
    monkeypatch.setattr(fused, "_LEAST_WEIGHTS", 0)
    monkeypatch.setattr(prompts, "_LONG", 0)
    monkeypatch.setattr(prompts, "_PIECE", 64)
    forms, compiled = [], fused._compiled
    monkeypatch.setattr(fused, "_compiled", lambda function, form: forms.append(form) or compiled(function, form))
    agree(generate(model, ids, mask, 60), want, model, mask)
    assert set(forms) == set(fused.Form)
    forms.clear()
    decoder = condense.GraphDecoder(model, batch_size=2, max_length=512)
    agree(tiny.decoded(decoder, ids, mask, max_new_tokens=60), want, model, mask)
    assert set(forms) == set(fused.Form)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "opt"])
def test_projections_on_streams_of_their_own_give_the_same_bits(name, monkeypatch):
    model, ids, calls, counts, found = condensed(FEW, name), tiny.tokens(1, 130, seed=9).cuda(), [], [], []
    read_all = streams._Together._read_all
    monkeypatch.setattr(fused, "_LEAST_WEIGHTS", 0)
    monkeypatch.setattr(streams._Together, "_read_all", lambda *x: calls.append(x[1]) or read_all(*x))
    for groups in (streams._OF_ONE_INPUT, ()):
        monkeypatch.setattr(streams, "_OF_ONE_INPUT", groups)
        decoder = condense.GraphDecoder(model, batch_size=1, max_length=512)
        logits = [decoder.prefill(ids)]
        for _ in range(60):
            logits.append(decoder.step(logits[-1].argmax(-1)))
        found.append(torch.stack(logits))
        counts.append(len(calls))
    assert found[0].equal(found[1])
    assert 0 < counts[0] == counts[1]
    assert not any("forward" in vars(module) for module in model.modules())


def test_another_thread_takes_memory_while_steps_are_captured(graphs, monkeypatch):
    model, (ids, mask), taken = condensed(FEW), padded(), []
    want = generate(model, ids, mask, 20, cache_implementation="dynamic")
    step = condense.caches.StaticCondensedLayer.step

    def stepped(self, *args, **kwargs):
        if torch.cuda.is_current_stream_capturing():
            size = 2**24 * (1 + len(taken))  # more than any block that is free
            thread = threading.Thread(target=lambda: taken.append(torch.ones(size, device="cuda").sum().item()))
            thread.start()
            thread.join()
        return step(self, *args, **kwargs)

    monkeypatch.setattr(condense.caches.StaticCondensedLayer, "step", stepped)
    agree(generate(model, ids, mask, 20), want, model, mask)
    decoder = condense.GraphDecoder(model, batch_size=2, max_length=512)
    agree(tiny.decoded(decoder, ids, mask, max_new_tokens=20), want, model, mask)
    assert len(graphs) == 1
    assert len(taken) == 2 * model.config.num_hidden_layers


def test_graph_after_prompts_with_a_selection():
    """Captured before the first prompt, replayed after prompts of different lengths, a single token too."""
    model = condensed(SELECT)
    decoder = condense.GraphDecoder(model, batch_size=2, max_length=512)
    ids, mask = padded(150, 31)
    for prompt, real in ((ids, mask), (ids[:, -1:], mask[:, -1:]), (ids, mask)):
        got = tiny.decoded(decoder, prompt, real, max_new_tokens=300)
        want = generate(model, prompt, real, 300, cache_implementation="dynamic")
        parted = (got != want).any(0)
        # what follows is read in steps, not as another prompt: a near tie cannot be looked up; the first 20 must agree
        assert not bool(parted[: prompt.shape[1] + 20].any())
    assert {layer.backend for layer in decoder.cache.layers} == {"triton"}


@pytest.mark.parametrize("choice", TURNS.values(), ids=TURNS)
def test_turns_between_replayed_steps(choice):
    """Over padded rows and then over others; float32 logits, of which no choice among groups may depend on rounding."""
    model = condensed(choice)
    ids, mask = padded()
    ids = torch.cat([ids, tiny.tokens(2, 80, seed=9).cuda()], dim=1)
    sizes = (150, *[1] * 20, 17, *[1] * 40, 2, 1)
    decoder = condense.GraphDecoder(model, batch_size=2, max_length=256)
    for real in (torch.cat([mask, torch.ones_like(ids[:, 150:])], dim=1), torch.ones_like(ids)):
        want = tiny.in_chunks(model, ids, sizes, mask=real)
        prompt, *turns = ids.split(sizes, dim=1)
        got = torch.stack([decoder.prefill(prompt, real[:, :150]), *map(decoder.extend, turns)], dim=1)
        want = want[:, torch.tensor(sizes).cumsum(0) - 1]
        assert (got - want).abs().max() < 1e-3 * want.abs().max()
    assert decoder._graph is not None


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_prompt_is_read_without_a_wait(method):
    """Holds where all layers are condensed; a stock one asks the device how far its cache is."""
    model = condensed(method)
    decoder = condense.GraphDecoder(model, batch_size=1, max_length=512)
    ids = tiny.tokens(1, 130, seed=9).cuda()
    tiny.decoded(decoder, ids, max_new_tokens=3)
    with no_waiting():
        got = decoder.prefill(ids)
    want = condense.GraphDecoder(model, batch_size=1, max_length=512).prefill(ids)
    assert torch.equal(got, want)


# advice of inductor, on TensorFloat32 for one
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled-and-captured"])
def test_logits_in_bfloat16(compiled):
    """300 given tokens: a graph's logits are as far from float32's as the growing cache's are."""
    # last queries and weighted keys: no anchor, whose choice is a matter of rounding
    exact, low = (condensed(METHODS["cca"], dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    ids = tiny.tokens(1, 430, seed=4).cuda()
    want, eager = (tiny.logits(model, ids)[:, 130:] for model in (exact, low))
    decoder = condense.GraphDecoder(low, batch_size=1, max_length=430, compile=compiled)
    decoder.prefill(ids[:, :130])
    got = torch.stack([decoder.step(ids[:, i]) for i in range(130, 430)], dim=1)
    assert (got - want).abs().mean() <= 1.5 * (eager - want).abs().mean()
    assert (got - want).abs().max() <= 2 * (eager - want).abs().max()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("choice", [*METHODS.values(), {1: METHODS["cca"]}], ids=str)
def test_generate_with_a_static_cache_compiled_by_transformers(choice):
    model, (ids, mask) = condensed(choice), padded(90, 61)
    settings = {"cache_implementation": "static", "compile_config": CompileConfig(), "return_dict_in_generate": True}
    out = generate(model, ids, mask, 60, **settings)
    assert out.past_key_values.is_compileable
    assert hasattr(model, "_compiled_call")
    agree(out.sequences, generate(model, ids, mask, 60, cache_implementation="dynamic"), model, mask)


@pytest.mark.parametrize("name", HYBRIDS)
def test_replayed_steps_beside_sliding_windows_linear_attention_and_convolutions(name, graphs):
    model = condense.apply(small.model(name).float().cuda(), HYBRIDS[name])
    if has_eager_experts(model):  # mixtures of experts, which a graph takes only in one product
        with pytest.raises(ValueError, match="batched_mm"):
            condense.GraphDecoder(model, batch_size=2, max_length=128)
        model.set_experts_implementation("batched_mm")
    ids, mask = padded(50, 37)
    growing = generate(model, ids, mask, 60, cache_implementation="dynamic")
    decoder = condense.GraphDecoder(model, batch_size=2, max_length=128)
    for _ in range(2):
        agree(tiny.decoded(decoder, ids, mask, max_new_tokens=60), growing, model, mask)
    assert decoder._graph is not None
    assert not graphs
    agree(generate(model, ids, mask, 60), growing, model, mask)
    assert len(graphs) == (name not in small.NO_STATIC_MASKS)


STEPS = 100
GENERATED = METHODS | {"selection": SELECT, "recall": condense.Recall(group_size=16, window=64, num_recall=2)}
# latents cannot be read as one prompt with a selection of its tokens
CELLS = (
    MIXED
    | {f"llama-{name}": ("llama", method) for name, method in GENERATED.items()}
    | {f"deepseek_v3-{name}": ("deepseek_v3", method) for name, method in GENERATED.items() if method is not SELECT}
)


@pytest.mark.parametrize(("name", "method"), CELLS.values(), ids=CELLS)
def test_tokens_are_those_of_the_growing_cache(graphs, name, method):
    model, (ids, mask) = condensed(method, name), padded()
    want = generate(model, ids, mask, STEPS, cache_implementation="dynamic")
    assert not graphs
    for times in (1, 2):
        got = generate(model, ids, mask, STEPS)
        if method is SELECT:  # steps cannot be read again as one prompt to look up a near tie
            assert torch.equal(got[:, : ids.shape[1] + 20], want[:, : ids.shape[1] + 20])
        else:
            agree(got, want, model, mask)
        assert len(graphs) == times


@pytest.mark.parametrize("setting", ["recall-device", "recall-host"])
def test_texts_shorter_than_a_window(graphs, setting):
    """At a width whose groups are read by lanes, in a cache that none will be read from."""
    model, ids = condensed(None, dtype=torch.bfloat16, head_dim=128), tiny.tokens(1, 20, seed=3).cuda()
    mask = torch.ones_like(ids)
    want = generate(model, ids, mask, STEPS, cache_implementation="dynamic")
    agree(generate(condense.apply(model, setting), ids, mask, STEPS), want, model, mask)
    assert graphs


@pytest.mark.parametrize("name", ["cca", "recall"])
def test_rows_that_have_ended_are_passed_over(graphs, monkeypatch, name):
    caches = []

    class Kept(replay.CacheOfOneCall):
        def __init__(self, *args):
            super().__init__(*args)
            caches.append(self)

    monkeypatch.setattr(replay, "CacheOfOneCall", Kept)
    model, (ids, mask) = condensed(GENERATED[name]), padded()
    free = generate(model, ids, mask, 24, cache_implementation="dynamic")[:, ids.shape[1] :]
    end = next(int(x) for x in free[0, 4:12] if x not in free[1])
    want = generate(model, ids, mask, 24, cache_implementation="dynamic", eos_token_id=end)
    got = generate(model, ids, mask, 24, eos_token_id=end)
    assert torch.equal(got, want)
    assert len(graphs) == len(caches) == 1
    read = 150 + int((free[0] == end).nonzero()[0]), 101 + 23
    assert {tuple(layer.buffers.seen.tolist()) for layer in caches[0].layers} == {read}
    # alone, the row ends the call, one step after its last
    want = generate(model, ids[:1], mask[:1], 24, cache_implementation="dynamic", eos_token_id=end)
    assert torch.equal(generate(model, ids[:1], mask[:1], 24, eos_token_id=end), want)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_shares_of_closed_groups_are_those_of_a_cpu_and_captured_steps_are_refused(family):
    noted = []
    for device in ("cpu", "cuda"):
        model = condense.apply(tiny.model(family).to(device, torch.float32), tiny.RECALL)
        with condense.closed_mass(model) as shares:
            tiny.generate(model, tiny.ROWS[0][None].to(device))
        noted.append(torch.stack([torch.stack(of_layer) for of_layer in shares.values()]))
    torch.testing.assert_close(*noted, rtol=0, atol=1e-3)
    ids = tiny.ROWS[0][None].cuda()
    cache = model(ids, use_cache=True).past_key_values
    with (
        torch.no_grad(), condense.closed_mass(model), pytest.raises(ValueError, match="got one captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):  # fmt: skip
        model(ids[:, :1], past_key_values=cache)
