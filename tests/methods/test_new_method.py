"""A new method is one class: it works everywhere without a change outside of it."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from models import tiny
from oracles import oracle
from transformers import AutoModelForCausalLM, StaticCache

import condense
from condense import config
from condense.methods import ChunkPooling, Layout
from condense.ops import Coarse, UniformRule
from condense.train import PhaseConfig

SIZE, WINDOW, DELAY = 5, 7, 3
RULE, CHOICE = UniformRule(chunk=4, window=6), condense.Recall().layout.choice


def _mean(chunks):
    k, v = chunks.tokens()
    return k.mean(3), v.mean(3)


def _more(chunks, dtype):
    """Means of a chunk, and a further tensor."""
    return *_mean(chunks), getattr(chunks.tokens()[0].mean((3, 4))[..., None], dtype)()


class Means(condense.Method):
    def represent(self, chunks, summary, *, scale, backend):
        return _mean(chunks)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Names of methods that a test makes are free again after it."""
    monkeypatch.setattr(config, "REGISTRY", dict(config.REGISTRY))


@pytest.fixture
def method():
    """Two entries per chunk, a bias that differs between them, and a summary that comes before the window ends."""

    @dataclass(frozen=True, kw_only=True)
    class NewestAndRest(condense.Method):
        name: ClassVar[str] = "newest-and-rest"
        strength: float = 0.5

        @property
        def layout(self):
            rule = UniformRule(chunk=SIZE, window=WINDOW, entries=2)
            return Layout(rule, summary_delay=DELAY, num_summary=2, bias=(1.5, 0.0))

        def represent(self, chunks, summary, *, scale, backend):
            k, v = chunks.tokens()
            key = k[:, :, :, :-1].mean(3) + self.strength * summary.to(k.dtype)
            keys = torch.stack([key, k[:, :, :, -1]], dim=3)
            values = torch.stack([v[:, :, :, :-1].amax(3), v[:, :, :, -1]], dim=3)
            return keys.flatten(2, 3), values.flatten(2, 3)

    return NewestAndRest()


def by_hand(method, q, k, v, scale):
    """One row and KV head, query by query. q ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``."""
    outs, qbar = [], q.mean(0)
    for t in range(len(k)):
        closed, keys, values, bias = max(0, t + 1 - WINDOW) // SIZE, [], [], []
        for j in range(closed):
            start, stop = j * SIZE, (j + 1) * SIZE
            summary = method.strength * qbar[stop + DELAY - 2 : stop + DELAY].mean(0)
            keys += [k[start : stop - 1].mean(0) + summary, k[stop - 1]]
            values += [v[start : stop - 1].amax(0), v[stop - 1]]
            bias += [1.5, 0.0]
        keys += list(k[closed * SIZE : t + 1])
        values += list(v[closed * SIZE : t + 1])
        bias += [0.0] * (t + 1 - closed * SIZE)
        logits = scale * q[:, t] @ torch.stack(keys).T + torch.tensor(bias).double()
        outs.append(logits.softmax(-1) @ torch.stack(values))
    return torch.stack(outs, 1)


def test_attention(backend, method):
    q, k, v = oracle.random_qkv(2, 4, 2, 43, 3, 4)
    got = condense.attention(q, k, v, method=method, backend=backend, padding=torch.tensor([0, 8]))
    for b, pads in enumerate((0, 8)):
        for h in range(2):
            want = by_hand(method, q[b, 2 * h : 2 * h + 2, pads:], k[b, h, pads:], v[b, h, pads:], 3**-0.5)
            torch.testing.assert_close(got[b, 2 * h : 2 * h + 2, pads:], want, rtol=1e-12, atol=1e-12)


def test_tuples_of_settings_survive_saving_and_lists_are_refused(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Weighted(Means):
        name: ClassVar[str] = "weighted"
        weights: tuple[tuple[float, ...], ...] = ()
        layout = Layout(RULE)

    model = condense.apply(tiny.model("llama"), Weighted(weights=((0.5, 1.0), ())))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert condense.models.condensed_layers(again) == condense.models.condensed_layers(model)
    listed = Weighted(weights=([1.0],))
    tiny.refused(r"must have hashable settings, tuples .*, got Weighted\(weights=\(\[1", condense.apply, again, listed)
    tiny.refused(
        "must have hashable settings, tuples in place of lists", PhaseConfig, "p", 1, 128, 1, method={0: listed}
    )


@pytest.fixture(params=["llama", "deepseek_v3"])
def colder(request):
    """A model with a method whose own `attend` divides the scores by 3, and which kernels could pool."""

    @dataclass(frozen=True, kw_only=True)
    class Colder(Means):
        name: ClassVar[str] = "colder"
        layout = Layout(RULE, pooling=ChunkPooling("mean", "mean"))

        def attend(self, q, context, *, scale, **options):
            return super().attend(q, context, scale=scale / 3, **options)

    return condense.apply(tiny.model(request.param), Colder())


def test_steps_use_the_methods_own_attend(colder, monkeypatch):
    """The shared decode step attends as `condense.ops.attend` does; it must not stand in for another `attend`."""
    ids = tiny.tokens(2, 40)
    whole = tiny.logits(colder, ids)
    monkeypatch.setattr("condense.caches.store.step_backend", lambda *args, **kwargs: "triton")  # as on CUDA
    torch.testing.assert_close(tiny.in_chunks(colder, ids, (17, 1, 1, 20, 1)), whole, **tiny.exact(colder))


def test_static_caches_refuse_another_attend(colder, monkeypatch):
    ids = tiny.tokens(1, 20)
    growing = tiny.generate(colder, ids)
    said = "attends in its own way.*leave cache_implementation unset"
    tiny.refused(said, tiny.generate, colder, ids, cache_implementation="static")
    tiny.refused("attends in its own way", condense.GraphDecoder, colder, batch_size=1, max_length=40)
    # `generate` must not choose a static cache for it, as it does on CUDA for other methods
    monkeypatch.setattr("condense.models.hooks.replayable_cache", lambda model, *_: StaticCache(model.config, 40))
    assert tiny.generate(colder, ids).equal(growing)


LAYOUTS = [
    (Layout(UniformRule(chunk=0, window=6)), "chunk must be an integer >= 1, got 0", _mean),
    (None, "layout: wanted a condense.methods.layout.Layout, got None", _mean),
    (Layout(UniformRule(chunk=4, window=-1)), "window must be an integer >= 0, got -1", _mean),
    (Layout(RULE, summary_delay=7), "summary_delay must be at most the window, 6, .* got 7", _mean),
    (Layout(RULE, num_summary=-1), "num_summary must be an integer >= 0, got -1", _mean),
    (Layout(RULE, bias=1.5), r"each entry of a chunk, 1, or empty, got 1\.5", _mean),
    (Layout(RULE, bias=(1.0, 2.0)), r"each entry of a chunk, 1, or empty, got \(1\.0, 2\.0\)", _mean),
    (Layout(RULE, pooling=ChunkPooling("mean", "max"), choice=CHOICE), "a choice, .* must be means .*'max'", _mean),
    (Layout(RULE, pooling=ChunkPooling("mean", "mean"), choice=CHOICE, matched=True), "and matched=True", _mean),
    (Layout(RULE, pooling=ChunkPooling("mean", "avg")), "layout: pooling must be one of 'weighted', .*'avg'", _mean),
    (Layout(RULE, pooling=ChunkPooling("select", "max")), "'mean' or 'max' where no summary .*, got 'select'", _mean),
    (Layout(RULE, entry_bits=5), "entry_bits must be one of 16, 8, 4, got 5", _mean),
    (Layout(RULE, coarse=Coarse(1, 20)), r"coarse.chunks must be an integer >= 2, got 1", _mean),
    (Layout(RULE, coarse=Coarse(4, 13)), r"two chunks more than the window of tokens, 14 or more, got .*13", _mean),
    (Layout(RULE, entry_bits=8, coarse=Coarse(4, 20)), "coarse entries are means of 16-bit entries", _mean),
    (Layout(RULE, coarse=Coarse(4, 20)), "without coarse entries, got 3 tensors", lambda x: _more(x, "double")),
    (Layout(RULE), "Own.represent.*got NoneType", lambda chunks: None),
    (Layout(RULE), "Own.represent.*as a tuple, got Tensor", lambda chunks: _mean(chunks)[0]),
    (Layout(RULE), r"Own.represent.*got \(1, 1, 5, 4\) torch.float64$", lambda chunks: _mean(chunks)[:1]),
    (Layout(RULE), "and torch.float64, .* torch.float32", lambda chunks: tuple(x.float() for x in _mean(chunks))),
    # twice as many entries as the layout says would otherwise be read one for another
    (Layout(RULE), r"\(1, 1, 5, 4\) .* 10, 4\)", lambda chunks: tuple(x.repeat(1, 1, 2, 1) for x in _mean(chunks))),
    (Layout(RULE), r"got \(1, 1, 5, 1, 4\)", lambda chunks: tuple(x[..., None, :] for x in _mean(chunks))),
    (Layout(RULE, num_summary=1, matched=True), r"must return biases \(1, 1, 5, 1\).*got none", _mean),
    # biases in half precision would be exact to three digits only
    (Layout(RULE, matched=True), r"float32 or wider.*got \(1, 1, 5, 1\) torch.float16", lambda x: _more(x, "half")),
    (Layout(RULE), r"got \(1, 1, 5, 4\) torch.float64, NoneType", lambda chunks: (_mean(chunks)[0], None)),
    # tensors that nothing reads; a static cache has no room for them
    (Layout(RULE), "must return keys and values alone.*got 3 tensors", lambda chunks: _more(chunks, "double")),
    # the spans of a rule of one's own would be read by some parts of the library, and its numbers by others
    (Layout(type("Own", (UniformRule,), {})(chunk=4, window=6)), "rule must be a condense.ops.UniformRule", _mean),
    (Layout(None), "rule must be a condense.ops.UniformRule .*, got None", _mean),
    (Layout(UniformRule(4, 6, max_chunks=-1)), "max_chunks must be an integer >= 0, got -1", _mean),
    (Layout(RULE, bias=("a",)), r"each entry of a chunk, 1, or empty, got \('a',\)", _mean),
    (Layout(RULE, bias=(1.5,), matched=True), r"bias must be empty if matched.*got \(1\.5,\)", _mean),
    (Layout(RULE, pooling=("mean", "mean")), r"pooling must be a ChunkPooling or None, got \('mean', 'mean'\)", _mean),
    (Layout(RULE, lookahead=True), "lookahead must be a Lookahead or None, got True", _mean),
    (Layout(RULE, pooling=ChunkPooling("mean", "mean", 2)), "num_focal.*, 3, but the rule has entries=1", _mean),
]


@pytest.mark.parametrize(("layout", "said", "entries"), LAYOUTS)
def test_layouts_that_cannot_be_and_entries_that_do_not_fit(layout, said, entries):
    class Own(condense.Method):
        def represent(self, chunks, summary, *, scale, backend):
            return entries(chunks)

    Own.layout = layout
    tiny.refused(said, condense.attention, *oracle.random_qkv(1, 2, 1, 20, 4, 4), method=Own())


def test_further_tensors_hold_as_many_columns_for_each_chunk():
    class Own(condense.Method):
        layout = Layout(RULE)

        def represent(self, chunks, summary, *, scale, backend):
            return *_mean(chunks), chunks.window_k[:, :, :1]

        def attend(self, q, context, **options):
            return super().attend(q, context, **options)

    said = r"further tensors of shape \[1, 1, n \* 6, ...\], .* got \(1, 1, 1, 4\)"
    tiny.refused(said, condense.attention, *oracle.random_qkv(1, 2, 1, 26, 4, 4), method=Own())


ATTENDED = [
    (
        lambda out, lse: (out.transpose(1, 2), None),
        r"must return an output \(1, 2, 26, 4\) torch.float64.*\(1, 26, 2, 4\)",
    ),
    (lambda out, lse: out, "as a tuple, got Tensor"),
    (lambda out, lse: (out.float(), None), r"got \(1, 2, 26, 4\) torch.float32, NoneType"),
]


@pytest.mark.parametrize(("attended", "said"), ATTENDED)
def test_outputs_of_an_attend_that_do_not_fit(attended, said):
    """Transformers' attention functions return heads behind tokens, which the output projection would not notice."""

    class Own(Means):
        layout = Layout(RULE)

        def attend(self, q, context, **options):
            return attended(*super().attend(q, context, **options))

    tensors = oracle.random_qkv(1, 2, 1, 26, 4, 4)
    tiny.refused(said, condense.attention, *tensors, method=Own())
    for family in ("llama", "deepseek_v3"):
        model = tiny.model(family)
        with condense.use(model, Own()):
            tiny.refused("Own.attend must return an output", tiny.logits, model, tiny.tokens(1, 26))


def test_an_lse_that_was_asked_for_and_one_that_was_not():
    class Never(Means):
        layout = Layout(RULE)

        def attend(self, q, context, **options):
            return super().attend(q, context, **options)[0], None

    class Always(Means):
        layout = Layout(RULE)

        def attend(self, q, context, *, return_lse=False, **options):
            return super().attend(q, context, return_lse=True, **options)

    tensors = oracle.random_qkv(1, 2, 1, 26, 4, 4)
    tiny.refused(
        r"if return_lse, a log-sum-exp \(1, 2, 26\)", condense.attention, *tensors, method=Never(), return_lse=True
    )
    assert condense.attention(*tensors, method=Always()).shape == (1, 2, 26, 4)


@pytest.mark.parametrize("value", [math.nan, math.inf, "0.5", None, True])
def test_bad_numbers_are_named(value):
    @dataclass(frozen=True, kw_only=True)
    class Own(condense.Method):
        count: int = 1
        strength: float = 0.5
        layout = Layout(RULE)

    tiny.refused("strength must be a finite number, got", Own, strength=value)
    for bad in (value, 0.5):
        tiny.refused("count must be an integer, got", Own, count=bad)
    assert Own(count=10**400, strength=10**400).count == 10**400


def test_settings_with_postponed_annotations_are_checked():
    """As every annotation is under ``from __future__ import annotations``."""

    @dataclass(frozen=True, kw_only=True)
    class Own(condense.Method):
        strength: "float" = 0.5
        count: "int | None" = None
        layout = Layout(RULE)

    tiny.refused("strength must be a finite number, got 'abc'", Own, strength="abc")
    tiny.refused("count must be an integer, got 0.5", Own, count=0.5)
    assert Own(count=None, strength=1).count is None


def test_a_method_that_reads_a_prompt_at_once_looks_ahead():
    class Own(condense.Method):
        name: ClassVar[str] = "own-prompt"
        layout = Layout(RULE)
        reads_prompt = True

    tiny.refused("must have a lookahead, as its entries depend on the prompt's end", condense.Method.parse, Own())


def check_caches(model, ids, **tolerance):
    whole = tiny.logits(model, ids)
    for cache in (None, StaticCache(model.config, 40)):
        torch.testing.assert_close(tiny.in_chunks(model, ids, (17, 1, 1, 20, 1), cache), whole, **tolerance)
    return whole


def test_a_built_in_method_with_another_represent_keeps_it_on_latents():
    class Newest(condense.CCA):
        name: ClassVar[str] = "newest"

        def represent(self, chunks, summary, *, scale, backend):
            k, v = chunks.tokens()
            return k[..., -1, :], v[..., -1, :]

    ids, model = tiny.tokens(1, 40), tiny.model("deepseek_v3")
    pooled = tiny.logits(condense.apply(model, condense.CCA(group_size=4, window=6)), ids)
    whole = check_caches(condense.apply(model, Newest(group_size=4, window=6)), ids, **tiny.EXACT)
    assert (whole - pooled).abs().max() > 0.1


def test_biases_may_be_wider_than_those_of_the_cache():
    class Wide(condense.Method):
        name: ClassVar[str] = "wide"
        layout = property(lambda self: Layout(RULE, matched=True))

        def represent(self, chunks, summary, *, scale, backend):
            return *_mean(chunks), chunks.tokens()[0].double().square().mean((3, 4))[..., None]

    check_caches(condense.apply(tiny.model("llama").float(), Wide()), tiny.tokens(1, 40), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("base", "said"), [(condense.CCA, "and inherits 'cca': give"), (condense.Method, "it: give")])
def test_a_method_without_a_name_is_no_models(base, said):
    class Unnamed(base):
        layout = property(lambda self: Layout(RULE))

    model = tiny.model("llama")
    tiny.refused(f"Unnamed must have a name of its own.*{said} the class name", condense.apply, model, Unnamed())
    assert not condense.models.condensed_layers(model)
