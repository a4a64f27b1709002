"""`condense verify`: good settings pass, planted faults fail, and texts that show nothing say so."""

import dataclasses
import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cli.test_commands import ran, run_here
from models import tiny
from transformers import DynamicCache

import condense
from condense import Dense, Recall, StreamingLLM
from condense.caches import CACHE
from condense.demo import demo_model, demo_text
from condense.evaluate import verify as verify_module
from condense.evaluate import verify_texts as verify_texts_module
from condense.evaluate.compare import attention_of
from condense.evaluate.intervals import MOST_NATS, Cell
from condense.evaluate.verify import ALL_OPEN, DENSE, WINDOW, VerifyConfig, verify
from condense.evaluate.verify_report import verdict
from condense.evaluate.verify_texts import BINS, NEEDS, TASKS, DenseReading, needs_far, verify_texts
from condense.tasks import encode_corpus

# caches are given by the name of the installed transformers
pytestmark = pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")
CONFIG = VerifyConfig((320,), texts=1, questions=1, greedy=3)
# 14 of the 18 groups that are closed at the end, in a store in host memory
GOOD = Recall(window=32, num_recall=14, unchosen="drop", store="host", slots=8)


class Broken(Recall):
    def represent(self, *args, **options):
        k, v, signs, *others = super().represent(*args, **options)
        return k, v, ~signs, *others


@pytest.fixture(scope="module")
def demo():
    return demo_model()


@pytest.fixture(scope="module")
def results(demo):
    broken = Broken(**{field.name: getattr(GOOD, field.name) for field in dataclasses.fields(GOOD)})
    few = GOOD.replace(group_size=4, num_recall=1e-9, min_recall=1)
    methods = {"few": {"rest": few}, "few, prompt exact": {"rest": few.replace(prompt="exact")}}
    methods |= {"good": GOOD, "broken": broken}
    steps = []
    found = verify(*demo, [demo_text().text], methods, CONFIG, on_step=steps.append)
    assert steps == [len(steps)] * len(steps)
    return {each.name: each for each in found}


def test_a_good_setting_passes_and_planted_faults_fail(results):
    assert list(results) == [DENSE, "few", "few, prompt exact", "good", "broken", WINDOW, ALL_OPEN]
    assert not results["good"].failed
    failed = {name: {cell for _, cell in results[name].failed} for name in ("few", "broken", WINDOW)}
    assert {"far", "copy"} <= failed["few"]
    # one number may be found by luck: 14 of 18 groups are open
    assert "copy" in failed["broken"]
    assert failed["broken"] & {*TASKS}
    assert {"far", "copy", *TASKS} <= failed[WINDOW]
    # text is read by steps after a prompt that is not: read densely, the second half would lose nothing
    few, after = (results[name].lengths[0].cells["other"].value for name in ("few", "few, prompt exact"))
    assert 0.01 < after != few
    said = verdict(list(results.values()))
    assert (said.cheapest, said.passing) == ("good", ["good"])
    assert "few fails: tokens that need far text at 320: +" in said.text
    assert f"n {results['few'].lengths[0].cells['far'].n} (too few tokens to be sure)" in said.text
    assert [name for name, result in results.items() if result.opens_all] == [ALL_OPEN]
    said = verdict([dataclasses.replace(result, opens_all=result.name == "good") for result in results.values()])
    assert "opens all groups: nothing was shown about its choice" in said.text
    assert 0.5 < results["good"].host < 1
    assert results["few"].device < results["good"].device + results["good"].host


def test_a_setting_whose_prompts_choose_does_not_open_all_groups():
    """Of 1,008 groups a step of this setting opens all, and a token that chooses for others 512."""
    device = condense.Method.parse("recall-device")
    assert [verify_module._opens_all([device], length) for length in (8192, 16384)] == [True, False]
    assert verify_module._opens_all([device.replace(prompt="exact")], 16384)


def test_all_groups_open_is_dense_attention(results):
    (each,), (dense,) = results[ALL_OPEN].lengths, results[DENSE].lengths
    # a hundredth of the bar: rounding in float32 moves a loss by some 1e-6
    assert all(abs(cell.value) < MOST_NATS / 100 for cell in each.cells.values())
    assert max(map(abs, each.divergence)) < MOST_NATS / 100
    assert each.found == dense.found
    assert each.greedy.share == 1.0
    assert sum(part.total for part in each.by_depth["numbers"]) == each.found["numbers"].total == 1


def test_texts_that_need_no_far_text_show_nothing(results):
    near = dataclasses.replace(results[ALL_OPEN], name=WINDOW)
    # tokens that need far text are those that a window loses, also in a model that reads nothing but noise from it
    dense, few, good, window, whole = (results[name] for name in (DENSE, "few", "good", WINDOW, ALL_OPEN))
    only = dataclasses.replace(window.lengths[0], cells={"far": window.lengths[0].cells["far"]})
    noise, coarse = dataclasses.replace(window, lengths=[only]), dataclasses.replace(few, name=ALL_OPEN)
    for words, *among in (
        ("nothing was shown", dense, good, near, whole),
        ("", good, noise, whole),
        ("too coarse", dense, good, window, coarse),
        ("\nNo setting passes.", dense, few, window, whole),
    ):
        said = verdict(among)
        assert said.cheapest is None
        assert words in said.text


def test_the_command_writes_a_file_and_a_page_that_are_read_again(results, monkeypatch, tmp_path):
    given = {}

    def measured(model, tokenizer, documents, methods, config, *, on_step):
        given.update(methods=methods, config=config)
        long = dataclasses.replace(results["broken"], name=f"recall:store=host,{'window=32,' * 9}slots=8")
        return [long if name == "broken" else each for name, each in results.items()]

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(verify_module, "verify", measured)
    file, page = tmp_path / "a.json", tmp_path / "a.md"
    out = ran("verify", "--length", "320", "--greedy", "3", "--json", str(file), "--page", str(page)).stdout
    assert set(given["methods"]) >= {"recall-host", "recall-device"}
    assert given["config"].lengths == (320,)
    assert "Cheapest that passes: good." in out
    # in the table too, though the name takes many lines
    assert f"{results['broken'].lengths[0].cells['copy'].value:+.3f}" in out.partition("cache: bytes")[0]
    assert "| bundled | good | " in page.read_text()
    assert "fifth of the text" in page.read_text()
    document = json.loads(file.read_text())
    assert document["provenance"]["seed"] == 0
    document["results"]["model"], document["results"]["verdict"]["cheapest"] = "another", None
    other = tmp_path / "b.json"
    other.write_text(json.dumps(document))
    ran("verify", str(file))
    done = run_here("verify", str(file), str(other))
    assert done.returncode == 1
    assert "another: few fails" in done.stdout
    full = Mock(side_effect=OSError("No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr("condense.cli.verify._print", full)
        assert run_here("verify", "--length", "320", "--json", str(tmp_path / "c.json")).returncode == 2
    ran("verify", str(tmp_path / "c.json"))
    monkeypatch.setattr("condense.results.write_results", full)
    done = run_here("verify", "--length", "320", "--json", str(tmp_path / "d.json"))
    assert done.returncode == 2
    assert "Cheapest that passes: good." in done.stdout


def test_texts_and_greedy_tokens_fit_learned_positions(demo):
    learned = tiny.model("gpt2", vocab_size=4096, n_positions=320), demo[1], [demo_text().text], {}
    few, many = (dataclasses.replace(CONFIG, greedy=greedy) for greedy in (40, 41))
    assert len(verify(*learned, few)) == 3
    tiny.refused("must fit the model's 320 learned positions, got 321", verify, *learned, many)


def test_bad_lengths():
    wrong = {512: "a list or a tuple, got 512", (): "one length at least", (512, "1K"): "an integer >= 256, got '1K'"}
    for lengths, said in wrong.items():
        tiny.refused(said, VerifyConfig, lengths)


def test_copies_repeat_the_first_half(demo):
    corpus = encode_corpus([demo_text().text], demo[1])
    drawn, again = (verify_texts(demo[1], corpus, 512, 2, questions=1, seed=3) for _ in range(2))
    for text in drawn:
        copied = text.ids[text.copy :]
        assert len(copied) == 64
        assert (np.lib.stride_tricks.sliding_window_view(text.ids[:256], 64) == copied).all(1).any()
    assert all((a.ids == b.ids).all() for a, b in zip(drawn, again, strict=True))
    # as many questions as fit, which are fewer than there are names too
    many = verify_texts(demo[1], corpus, 512, 1, questions=10_000, seed=3)[0].asked
    assert all(1 < len(sequence.keys) < 50 for sequence in many.values())


def test_tokens_that_need_far_text(demo):
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, 400, 70))
    losses = torch.zeros(70)
    short, block = 17, 4
    wanted = torch.zeros(70, dtype=torch.bool)
    with torch.no_grad():
        for start in [*range(35, 67, block), 66]:
            logits = demo[0](input_ids=ids[None, start - short : start + block]).logits[0, short - 1 : -1]
            alone = torch.nn.functional.cross_entropy(logits, ids[start : start + block], reduction="none")
            wanted[start : start + block] = alone > NEEDS
    assert (needs_far(demo[0], ids, losses) == wanted).all()
    losses[wanted] = 100.0
    assert not needs_far(demo[0], ids, losses).any()


def test_a_graphs_cache_a_growing_one_and_one_forward_read_alike(demo, monkeypatch):
    monkeypatch.setattr(verify_texts_module, "replayable_cache", lambda *given: None)  # as on CUDA
    ids, ends = torch.from_numpy(np.random.default_rng(0).integers(4, 400, 90)), (40, 41, 42, 60, 61, 90)
    read = {}
    for method in (condense.Recall(num_recall=90), condense.Reread(share=1.0), condense.Dense()):
        with torch.no_grad(), attention_of(demo[0], method):
            decoder = verify_texts_module._decoder(demo[0], 90)
            assert getattr(decoder, "max_length", 256) == 256  # kernels are compiled once for texts of any length
            read[type(decoder), type(method)] = verify_texts_module._turns(demo[0], decoder, ids, ends)
    graph, growing, dense = read.values()
    assert [decoder.__name__ for decoder, _ in read] == ["GraphDecoder", "_Growing", "_Growing"]
    torch.testing.assert_close(graph, dense, rtol=0, atol=1e-4)
    torch.testing.assert_close(growing, dense, rtol=0, atol=1e-4)
    wrote = demo[0].generate(ids[None], max_new_tokens=5, do_sample=False)[0, 90:]
    with torch.no_grad():
        assert verify_texts_module._written(demo[0], ids, 5).equal(wrote)


def test_dense_attention_reads_nothing_by_token_and_little_twice(demo):
    """Forwards by tokens: first half, second half, short contexts, copy, one of each task; then a prompt and steps."""
    text = verify_texts(demo[1], encode_corpus([demo_text().text], demo[1]), 512, 1, questions=2, seed=0)[0]
    stock, condensed = [], []

    def note(model, given, options):
        ids = options.get("input_ids", *given)
        (condensed if condense.models.condensed_layers(model) else stock).append(ids.shape[1])

    hook = demo[0].register_forward_pre_hook(note, with_kwargs=True)
    verify_texts_module.read_text(demo[0], text, Dense(), DenseReading(), 3)
    hook.remove()
    asked = [sequence.answers[-1][1] - 1 for sequence in text.asked.values()]
    assert stock == [223, 224, 140, 140, 64, *asked]
    assert condensed == [448, 1, 1]


def test_bars_of_a_task_hold_for_its_bound_too():
    texts = np.full(8, 40.0)
    assert Cell.of(texts, texts, texts, relative=True).passes(task=True)
    one_text = texts - np.eye(8)[0] * 3  # 0.9 % lost, all of it in one text
    cell = Cell.of(one_text, texts, texts, relative=True)
    assert cell.value == pytest.approx(3 / 320)
    assert cell.high > 0.02
    assert not cell.passes(task=True)


def test_divergence_is_that_of_one_piece_of_a_stretch(demo, monkeypatch):
    monkeypatch.setattr(verify_texts_module, "_PIECE", 4)
    model, _ = demo
    ids, dense, apart = torch.arange(100, 100 + 8 * BINS * 2), DenseReading(), []
    for method in (Dense(), StreamingLLM(sink=0, window=8)):
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), attention_of(model, method):
            model(ids[None, : len(ids) // 2 - 1], **{CACHE: cache}, use_cache=True, logits_to_keep=1)
            apart.append(verify_texts_module._read_half(model, ids, cache, dense)[1].unflatten(0, (BINS, 2, 4)))
    assert sorted(dense.logits) == list(range(0, 2 * BINS, 2))
    assert bool((apart[0][:, 0] == 0).all())
    assert bool((apart[1][:, 0] > 0).all())
    assert all(bool(x[:, 1].isnan().all()) for x in apart)
