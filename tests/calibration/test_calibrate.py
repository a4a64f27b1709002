"""A calibration on a small model: what is measured, chosen, verified, kept, refused; allocations against all others."""

import dataclasses
import itertools
import json
import random
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from models import tiny
from torch.nn import functional

import condense
from condense import CCA, CalibrationConfig, Dense, Recall, StreamingLLM
from condense.calibration import default_candidates
from condense.calibration.curve import Curve, best_within, choose, greedy_path, most_bytes, verify
from condense.calibration.measure import Meter
from condense.calibration.report import LayerLoss, Mean
from condense.calibration.samples import draw_samples
from condense.models import adapted, condensed_layers
from condense.models.inspect import inspect

CANDIDATES = (Dense(), Recall(group_size=4, window=16, num_recall=4, store="host", slots=4), StreamingLLM(window=16))
BAD = {
    "no-goal": ({"budget_nats": None}, "budget_nats and cache must not both be None"),
    "zero": ({"budget_nats": 0.0}, "budget_nats must be a finite number > 0"),
    "percent": ({"cache": 9.0}, r"cache must be a share of the dense cache, at most 1 \(0\.09 for 9 %\), got 9\.0"),
    "texts": ({"texts": 1}, "texts must be an integer >= 2"),
    "twice": ({"candidates": (Dense(), "dense")}, "candidates must differ"),
    "dense": ({"candidates": (Dense(),)}, "candidates must hold one besides dense attention"),
    "letters": ({"candidates": "recall-device"}, "candidates must be a list or a tuple, got 'recall-device'"),
    "one": ({"candidates": Dense()}, r"candidates must be a list or a tuple, got Dense\(\)"),
    "ahead": ({"candidates": (CCA(summary="prompt"),)}, "sees later tokens of a whole text: use summary="),
    "host": ({"host_memory": False}, r"candidates: wanted no tokens in host memory, got Recall.*: use store=device"),
    "kept": ({"candidates": ("recall-device", "recall-device:prompt=exact,keep=0.5")}, "use keep=1"),
}
CONFIG = CalibrationConfig(budget_nats=0.2, candidates=CANDIDATES, length=128, texts=3)
GOALS = [
    ({"cache": 0.35, "budget_nats": 1e-6}, r"cannot both be met: at .*% of the cache .* loses .* nats; at 100"),
    ({"candidates": CANDIDATES[1:], "budget_nats": 1e-9}, "none of these candidates stays within 1e-09: the most"),
    ({"hidden_numbers": 40}, r"hidden_numbers must fit into texts of 128 tokens .*, got 40, of which \d+ do: hide"),
    ({"hidden_numbers": 301}, r"hidden_numbers must be at most 300, as names are pairs of 600 words, got 301"),
    ({"texts": 500}, r"text must have \d+ tokens, 500 texts of 128 to measure and as many to verify, got \d+"),
]
EVERY = [dict(enumerate(numbers)) for numbers in itertools.product(range(4), repeat=4)]


@pytest.fixture(scope="module")
def model(tokenizer):
    """Three layers whose attention matters, in float64; the last matters most."""
    model = tiny.model("llama", vocab_size=len(tokenizer))
    with torch.no_grad():
        for layer, share in zip(model.model.layers, (0.001, 0.03, 0.5), strict=True):
            layer.self_attn.o_proj.weight.mul_(share)
    return model


@pytest.fixture(scope="module")
def result(model, tokenizer, text):
    return condense.calibrate(model, tokenizer, [text], CONFIG)


def refused(said, *arguments, **options):
    tiny.refused(said, condense.calibrate, *arguments, **options)


def test_stretches_do_not_overlap_and_depend_on_the_seed(tokenizer, text, corpus):
    samples = draw_samples(tokenizer, [text], CONFIG)
    bos = int(tokenizer.bos_token_id is not None)
    size = 128 - bos
    places = [corpus.tokens[i : i + size].tolist() for i in range(0, len(corpus.tokens) - size, size)]
    drawn = [places.index(sample.ids[bos:].tolist()) for sample in (*samples.measured, *samples.held_out)]
    assert len(samples.measured) == len(samples.held_out) == 3
    assert len(set(drawn)) == 6
    assert all(sample.compared.tolist() == list(range(64, 128)) for sample in samples.measured)
    again, other = (draw_samples(tokenizer, [text], dataclasses.replace(CONFIG, seed=s)) for s in (0, 1))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(samples.measured, again.measured, strict=True))
    assert any(not torch.equal(a.ids, b.ids) for a, b in zip(samples.measured, other.measured, strict=True))


def test_hidden_numbers_are_in_texts_of_their_half(tokenizer, text):
    samples = draw_samples(tokenizer, [text], dataclasses.replace(CONFIG, hidden_numbers=2, length=192))
    assert len(samples.measured) == len(samples.held_out) == 6
    for sample in (*samples.measured[3:], *samples.held_out[3:]):
        assert len(sample.ids) == 192
        for start, stop in sample.answers:
            answer = tokenizer.decode(sample.ids[sample.compared[start:stop]])
            assert answer.strip().isdecimal()
            assert tokenizer.decode(sample.ids).count(answer) == 2  # where it is hidden, and after the question


def test_a_reading_is_the_divergence_of_the_predictions_of_steps(model, tokenizer, text):
    few = [Recall(group_size=4, window=8, num_recall=2, prompt=prompt) for prompt in ("recall", "exact")]
    own, exact = Meter(model, few, draw_samples(tokenizer, [text], CONFIG)).read(0, [{1: 0}, {1: 1}])
    assert own == exact
    assert own.kl > 1e-6
    tiny.refused("candidates must differ in their steps", dataclasses.replace, CONFIG, candidates=tuple(few))
    samples = draw_samples(tokenizer, [text], dataclasses.replace(CONFIG, hidden_numbers=2, length=192))
    meter = Meter(model, CANDIDATES, samples)
    for number in (0, 3):
        sample = samples.measured[number]
        dense = tiny.logits(model, sample.ids[None])[0, sample.compared - 1].log_softmax(-1)
        with condense.use(model, {1: CANDIDATES[2], 2: CANDIDATES[1]}):
            log_q = tiny.logits(model, sample.ids[None])[0, sample.compared - 1].log_softmax(-1)
        targets = sample.ids[sample.compared]
        stock, (kl, nats, right) = meter.read(number, [{}, {1: 2, 2: 1}])
        assert stock[:2] == (0, 0)
        assert kl == pytest.approx(float(functional.kl_div(log_q, dense, log_target=True, reduction="batchmean")))
        assert nats == pytest.approx(float(functional.nll_loss(log_q, targets) - functional.nll_loss(dense, targets)))
        hits = (log_q.argmax(-1) == targets).tolist()
        assert right == tuple(all(hits[start:stop]) for start, stop in sample.answers)
    assert condensed_layers(model) == {}


def test_what_is_chosen_is_within_the_budget_on_text_that_nothing_was_measured_on(result, model, tokenizer, text):
    assert set(result.allocation) == {0, 1, 2}
    assert result.chosen.kl.mean <= CONFIG.budget_nats
    assert result.verified.kl.mean <= CONFIG.budget_nats
    assert result.chosen.methods == result.verified.methods
    assert 0 < result.chosen.cache < 1
    held_out = draw_samples(tokenizer, [text], CONFIG).held_out
    losses = []
    for sample in held_out:
        dense = tiny.logits(model, sample.ids[None])[0, 63:-1]
        with condense.use(model, result.allocation):
            log_q = tiny.logits(model, sample.ids[None])[0, 63:-1].log_softmax(-1)
        losses.append(float(functional.kl_div(log_q, dense.log_softmax(-1), log_target=True, reduction="batchmean")))
    assert result.verified.kl.mean == pytest.approx(np.mean(losses))
    assert result.verified.kl.error == pytest.approx(np.std(losses, ddof=1) / 3**0.5)


def test_the_curve_goes_down_and_nothing_smaller_on_it_is_within_the_budget(result):
    caches = [point.cache for point in result.curve]
    assert caches == sorted(caches, reverse=True)
    assert result.curve[0].methods == dict.fromkeys(range(3), Dense())
    assert result.curve[0].kl == (0, 0)
    assert result.chosen in result.curve
    assert result.steps_back > 0 or not result.curve[result.curve.index(result.chosen) + 1].within(CONFIG)
    assert [point.methods for point in result.uniform] == [dict.fromkeys(range(3), method) for method in CANDIDATES]


def test_the_path_has_each_candidate_in_all_layers_that_nothing_beats(model):
    """Layer 0 gets the smaller window at once, so that no greedy allocation has the larger one in all layers."""
    methods = (Dense(), StreamingLLM(window=24), StreamingLLM(window=16))
    lost = {methods[1]: (0.1, 0.1, 0.1), methods[2]: (0.105, 5.0, 5.0)}
    losses = [LayerLoss(i, method, Mean(of[i], 0.0), None) for i in range(3) for method, of in lost.items()]
    config = dataclasses.replace(CONFIG, candidates=methods)
    curve = Curve(None, config, losses, [inspect(model, method, 128) for method in methods])
    greedy = [(0, 0, 0), (2, 0, 0), (2, 1, 0), (2, 1, 1), (2, 2, 1), (2, 2, 2)]
    assert [tuple(each.values()) for each in curve.path] == [*greedy[:3], (1, 1, 1), *greedy[3:]]
    caches = [curve.cache(at) for at in range(len(curve.path))]
    assert caches == sorted(caches, reverse=True)


def _judged(measured, held_out, small=0):
    """Stands for a path of which only is known where it is within the budget, and from where on it is small enough."""

    def points(judgements):
        return lambda at: SimpleNamespace(within=lambda config: judgements[at], quality=lambda: f"loses {at} nats")

    return SimpleNamespace(
        path=measured, grid=range(len(measured)), small_enough=lambda: small, measure_grid=lambda: None,
        measured=points(measured), verified=points(held_out), cache=lambda at: 1 / (1 + at),
    )  # fmt: skip


def test_a_step_back_goes_to_one_that_keeps_to_the_budget_on_both_halves():
    curve = _judged(measured=[True, False, True], held_out=[True, True, False])
    assert verify(curve, CONFIG, 2) == 0
    # with a size, one further on may be within the budget
    both = dataclasses.replace(CONFIG, cache=0.5)
    curve = _judged(measured=[True, True, False, False], held_out=[True] * 4, small=1)
    assert choose(curve, both) == 1
    curve = _judged(measured=[True, False, True, False], held_out=[True, True, False, True], small=1)
    curve.grid = [0, 2, 3]
    assert choose(curve, both) == 2
    tiny.refused(r"on the text that was measured: 50\.0% of the cache loses 1 nats there", verify, curve, both, 2)


def test_an_interrupted_one_goes_on(result, model, tokenizer, text, tmp_path, monkeypatch):
    path, interrupted = tmp_path / "measured.json", Mock(side_effect=[*[None] * 10, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        condense.calibrate(model, tokenizer, [text], CONFIG, measured=path, on_forward=interrupted)
    kept = len(json.loads(path.read_text())["readings"])
    assert kept > 5
    whole, rest = Mock(), Mock()
    condense.calibrate(model, tokenizer, [text], CONFIG, on_forward=whole)
    monkeypatch.setattr(model.config, "_name_or_path", "elsewhere")  # the same model, read from another folder
    assert condense.calibrate(model, tokenizer, [text], CONFIG, measured=path, on_forward=rest) == result
    assert kept - 2 <= whole.call_count - rest.call_count <= kept + 1
    # another budget needs no forward that was made already; another model is another matter
    rest.reset_mock()
    cheaper = dataclasses.replace(CONFIG, budget_nats=0.1)
    condense.calibrate(model, tokenizer, [text], cheaper, measured=path, on_forward=rest)
    assert rest.call_count < whole.call_count / 4
    other = tiny.model("llama", vocab_size=len(tokenizer))
    refused("measurements of another model, text, length, seed or", other, tokenizer, [text], CONFIG, measured=path)
    kept, said = json.loads(path.read_text()), "file of earlier measurements, .*; remove it, or name another file"
    for wrong in (*(json.dumps(kept | {"readings": {"0 0:0": reading}}) for reading in (None, 0.1)), "{"):
        path.write_text(wrong)
        refused(said, model, tokenizer, [text], CONFIG, measured=path)
    refused("wanted a file of earlier measurements", model, tokenizer, [text], CONFIG, measured=tmp_path)


def test_the_file_is_what_apply_reads(result, model, tmp_path):
    path = result.save(tmp_path / "allocation.json")
    with condense.use(model, f"@{path}"):
        assert condensed_layers(model) == result.allocation
    written = json.loads(path.read_text())["calibration"]
    assert written["verified"]["kl"] == list(result.verified.kl)
    assert written["config"]["candidates"] == [method.to_dict() for method in CANDIDATES]
    assert written["provenance"]["seed"] == 0
    with pytest.raises(FileExistsError):
        result.save(path)


def test_a_size_of_the_cache(result, model, tokenizer, text):
    smaller = dataclasses.replace(CONFIG, budget_nats=None, cache=0.6)
    small = condense.calibrate(model, tokenizer, [text], smaller)
    assert small.chosen.cache <= 0.6
    assert small.curve[small.curve.index(small.chosen) - 1].cache > 0.6
    both = dataclasses.replace(CONFIG, budget_nats=10.0, cache=0.6)
    assert condense.calibrate(model, tokenizer, [text], both).allocation == small.allocation
    far = dataclasses.replace(smaller, cache_length=1280)
    assert condense.calibrate(model, tokenizer, [text], far).uniform[2].cache < small.uniform[2].cache / 2


@pytest.mark.parametrize(("changes", "said"), GOALS, ids=["both", "budget", "numbers", "names", "text"])
def test_goals_that_cannot_be_met(model, tokenizer, text, changes, said):
    refused(said, model, tokenizer, [text], dataclasses.replace(CONFIG, **changes))


def test_what_can_be_known_beforehand_is_said_before_anything_is_measured(model, tokenizer, text, monkeypatch):
    measured = Mock(side_effect=AssertionError("a text was read"))
    small = dataclasses.replace(CONFIG, cache=0.01)
    refused(r"cache must be at least 0\.\d+, what the smallest", model, tokenizer, [text], small, on_forward=measured)

    def refuse(store, k, v, latent, groups=0):
        if store.settings.choice is not None:
            raise ValueError("store='host' needs a kernel")

    monkeypatch.setattr("condense.caches.store.Store.check", refuse)
    said = r"candidates: Recall\(.*: store='host' needs a kernel"
    refused(said, model, tokenizer, [text], CONFIG, on_forward=measured)
    assert condensed_layers(model) == {}


def test_what_the_texts_do_not_show_is_said(model, tokenizer, text, result):
    """A window that keeps to the budget shows that far text is not needed, numbers that nothing finds show nothing."""
    lost = result.uniform[2].kl.mean
    for budget, number in ((lost * 1.5, 1), (lost / 2, 0)):
        there = condense.calibrate(model, tokenizer, [text], dataclasses.replace(CONFIG, budget_nats=budget)).doubts
        assert len(there) == number
        assert all("StreamingLLM(window=16) in all layers is within the budget too" in doubt for doubt in there)
    asked = dataclasses.replace(CONFIG, budget_nats=None, cache=0.9, hidden_numbers=1, length=192, texts=2)
    (said,) = condense.calibrate(model, tokenizer, [text], asked).doubts
    assert said.startswith("dense attention itself finds only 0 of 2 hidden numbers")


def test_small_losses_are_not_said_to_be_none():
    assert str(Mean(3e-7, 1e-7)) == "3.0e-07±1.0e-07"
    assert str(Mean(0.0, 0.0)) == "0.0000±0.0000"


@pytest.mark.parametrize(("changes", "said"), BAD.values(), ids=BAD)
def test_bad_settings(changes, said):
    tiny.refused(said, dataclasses.replace, CONFIG, **changes)


@pytest.mark.parametrize("length", [4096, 16384, 131072])
def test_by_default_a_tenth_of_the_cache_is_enough_to_recall_in_all_layers(length):
    # of half that width the step of each key, which is as long for every width, takes half a percent more
    model = tiny.model("llama", torch.bfloat16, head_dim=128)
    kept = []
    for method in default_candidates(length, latents=False):
        rows = inspect(model, {"rest": method}, length)
        kept.append(sum(row.bytes for row in rows) / sum(row.dense_bytes for row in rows))
    assert all(share <= most for share, most in zip(kept, (1.0, 0.34, 0.15, 0.1, 0.06, 0.04), strict=True))


def test_latents_by_default(tokenizer, text):
    model = tiny.model("deepseek_v3", vocab_size=len(tokenizer))
    result = condense.calibrate(model, tokenizer, [text], CalibrationConfig(cache=0.9, length=192, texts=2))
    assert result.config.candidates == default_candidates(192, latents=True)
    assert result.chosen.cache <= 0.9


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_without_host_memory_only_the_first_layer_opens_all_groups(kind, tokenizer, text, monkeypatch):
    monkeypatch.setattr(adapted.logger, "warning_once", said := Mock())
    model, latents = tiny.model(kind, vocab_size=len(tokenizer)), kind == "deepseek_v3"
    asked = CalibrationConfig(cache=0.6, length=192, texts=2, host_memory=False)
    result = condense.calibrate(model, tokenizer, [text], asked)
    opened, fewer, *others = result.config.candidates
    assert (opened.num_recall, fewer.num_recall) == (1.0, 1024 if latents else 512)
    assert opened.prompt == fewer.prompt == ("exact" if latents else "shared")
    first, *later = sorted(result.allocation)
    for point in (result.chosen, *result.curve):
        assert point.host == 0
        assert point.methods[first] in (opened, *others)
        assert {point.methods[layer] for layer in later} <= {fewer, *others}
    assert result.chosen.cache <= 0.6
    assert len(result.layers) == 3 * (1 + len(later))  # what no layer may have was not measured
    said.assert_not_called()  # candidates are tried, so nobody needs to be told that pooling asks for training


@pytest.mark.parametrize(("length", "opened"), [(128, (8, 2)), (4096, (64, 16)), (131072, (512, 128))])
def test_candidates_open_as_many_groups_as_the_length_allows_twice_as_many_with_latents(length, opened):
    for latents in (False, True):
        methods = default_candidates(length, latents=latents)[2:4]
        numbers = [number * (2 if latents else 1) for number in opened]
        assert [method.num_recall for method in methods] == [method.slots for method in methods] == numbers
        assert {method.prompt for method in methods} == {"exact" if latents else "shared"}


@pytest.mark.parametrize(("number", "said"), [(2, r"StreamingLLM\(window=16\)"), (None, "dense attention")])
def test_predictions_that_are_not_finite_are_refused_by_name(model, tokenizer, text, monkeypatch, number, said):
    """Asked for a size, every layer would get them, as nothing is less than NaN."""
    logits, config = Meter._logits, dataclasses.replace(CONFIG, budget_nats=None, cache=0.9)

    def broken(meter, sample, allocation):
        is_broken = number is None or number in allocation.values()
        return logits(meter, sample, allocation) * (torch.nan if is_broken else 1)

    monkeypatch.setattr(Meter, "_logits", broken)
    refused(f"must be finite to be compared, got .* of nan nats with {said}", model, tokenizer, [text], config)


def test_models_and_texts_that_are_not_ready(tokenizer, text):
    model = tiny.model("llama", vocab_size=len(tokenizer))
    refused("texts must be a list of texts, got one alone", model, tokenizer, text, CONFIG)
    with condense.use(model, CCA()):
        refused(r"call condense\.restore", model, tokenizer, [text], CONFIG)
    refused(r"call model\.eval\(\)", model.train(), tokenizer, [text], CONFIG)
    model.eval().to("meta")
    refused(r"all of its weights on devices, got model\.embed\S+ offloaded", model, tokenizer, [text], CONFIG)
    learned = tiny.model("gpt2", vocab_size=len(tokenizer))
    for name in ("length", "cache_length"):
        config = dataclasses.replace(CONFIG, **{name: 129})
        refused(f"^{name} must fit the model's 128 learned positions, got 129", learned, tokenizer, [text], config)
    config = dataclasses.replace(CONFIG, budget_nats=None, cache=0.9, texts=2)
    assert condense.calibrate(learned, tokenizer, [text], config).chosen.cache <= 0.9


def test_the_path_begins_with_what_loses_least_and_never_takes_what_loses_more_and_keeps_more():
    costs, sizes = {0: [0.2, 0.0, 0.0, 0.5]}, {0: [10, 80, 60, 20]}
    assert greedy_path(costs, sizes) == [{0: 2}, {0: 0}]
    # equals go to the lowest layer
    costs, sizes = {i: [0.0, 1.0] for i in range(3)}, {i: [2, 1] for i in range(3)}
    assert [sum(step.values()) for step in greedy_path(costs, sizes)] == [0, 1, 2, 3]
    assert greedy_path(costs, sizes)[1] == {0: 1, 1: 0, 2: 0}


def total(of, allocation):
    return sum(of[i][n] for i, n in allocation.items())


@pytest.mark.parametrize("seed", range(20))
def test_no_allocation_of_the_path_is_larger_than_one_that_loses_less_nor_does_one_that_fits_lose_less(seed):
    rng = random.Random(seed)
    costs = {i: [0.0, *(float(rng.randrange(1, 50)) for _ in range(3))] for i in range(4)}
    sizes = {i: [100, *(rng.randrange(1, 100) for _ in range(3))] for i in range(4)}
    both = EVERY, greedy_path(costs, sizes)
    every, path = ([(total(costs, x), total(sizes, x)) for x in allocations] for allocations in both)
    assert path[0] == (0.0, 400)
    assert path[-1][1] == min(size for _, size in every)
    for cost, size in path:
        assert not any((c < cost and s <= size) or (c <= cost and s < size) for c, s in every)
    room = rng.randrange(sum(map(min, sizes.values())), 400)
    best = best_within(costs, sizes, room)
    assert total(sizes, best) <= room
    assert total(costs, best) == min(cost for cost, size in every if size <= room)


def test_allocations_by_hand():
    costs, sizes = {0: [0.0, 0.1], 1: [0.0, 0.2]}, {0: [10**9, 7], 1: [10**9, 11]}
    assert best_within(costs, sizes, 18) == {0: 1, 1: 1}
    assert best_within({0: [0.0, 0.0, 1.0]}, {0: [30, 20, 10]}, 100) == {0: 1}
    # sizes are rounded up to small steps
    costs = {i: [0.0, 1.0] for i in range(3)}
    sizes = {i: [2**30 + 1, 1] for i in range(3)}
    # in steps of 2 ** 17 bytes: two large ones need two steps more than their bytes
    assert best_within(costs, sizes, 2**31 + 2) == {0: 0, 1: 1, 2: 1}
    assert sum(best_within(costs, sizes, 2**31 + 2**19).values()) == 1


def test_a_share_has_room_for_what_it_is_the_share_of():
    """Also where the product of share and bytes is rounded to less than that, as 0.29 * 100 is."""
    lost = 0
    for tokens in (100, 192, 8192):
        for kept in range(1, tokens + 1):
            room = most_bytes(kept / tokens, 64 * tokens)
            assert room == 64 * kept
            assert best_within({0: [0.0]}, {0: [64 * kept]}, room) == {0: 0}
            lost += int(kept / tokens * 64 * tokens) < room
    assert lost > 0
