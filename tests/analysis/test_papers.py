"""What the analyses of the papers' claims measure, against weights, eigenvalues and counts made in other ways."""

import json
import sys

import pytest
import torch
from models import tiny
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import condense
from condense.analysis import conditioning, counterexample, keys_read, measure_cost, measure_sparsity, noise_effect
from condense.analysis.conditioning import condition_number, group_means
from condense.analysis.sparsity import last_query_weights
from condense.cli.main import main


def test_weights_are_those_of_the_model_s_own_eager_attention():
    model, ids = tiny.model("llama"), tiny.tokens(1, 30)[0]
    found = last_query_weights(model, ids)
    model.set_attn_implementation("eager")
    expected = model(ids[None], output_attentions=True).attentions
    assert len(found) == len(expected)
    for weights, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(weights), whole[0, :, -1].float(), rtol=1e-5, atol=1e-6)


def test_sparsity_counts_texts_with_a_weight_above_the_rate():
    model, ids = tiny.model("llama"), tiny.tokens(1, 60)[0]
    layers = measure_sparsity(model, [ids], [20, 30], rhos=[1.0, 0.5, 0.05], sequences=2)
    for number, layer in enumerate(layers):
        for length in (20, 30):
            samples = [last_query_weights(model, ids[i : i + length])[number] for i in (0, 60 - length)]
            for rho in (0.5, 0.05):
                share = sum((w.max(-1) > 1 / (length * rho)).mean() for w in samples) / 2
                assert layer.sparse[rho][length] == pytest.approx(share)
            # some weight is above the mean unless all are equal
            assert layer.sparse[1.0][length] == 1.0
        assert sum(layer.histogram) == pytest.approx(1)
        assert layer.top[1] <= layer.top[4] <= layer.top[16] <= 1 + 1e-6
    with pytest.raises(ValueError, match="longest text"):
        measure_sparsity(model, [ids], [61])


def test_sparsity_takes_stretches_from_every_text():
    model, texts = tiny.model("llama"), list(tiny.tokens(2, 60))
    together = measure_sparsity(model, texts, [20], rhos=[0.3], sequences=4)
    alone = [measure_sparsity(model, [ids], [20], rhos=[0.3], sequences=2) for ids in texts]
    assert alone[0][0].top != alone[1][0].top
    for layer, *of_texts in zip(together, *alone, strict=True):
        assert layer.top == {n: pytest.approx(sum(x.top[n] for x in of_texts) / 2) for n in layer.top}


def test_noise_moves_predictions_more_the_more_there_is_and_leaves_nothing_behind():
    model, ids = tiny.model("llama"), tiny.tokens(2, 40)
    before = model(ids).logits
    functions = dict(ALL_ATTENTION_FUNCTIONS)
    for method in (condense.Dense(), tiny.CCA):
        none, little, much = noise_effect(model, method, list(ids), variances=(0.0, 0.01, 1.0))
        assert none == 0 < little < much
    assert torch.equal(model(ids).logits, before)
    assert dict(ALL_ATTENTION_FUNCTIONS) == functions


@pytest.mark.parametrize("seed", range(20))
def test_theorem_3_holds_for_the_hessian_of_the_weights(seed):
    v = torch.randn(128, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = conditioning(v, 4)
    assert found.weights_grouped <= found.weights
    eigenvalues = torch.linalg.eigvalsh(v[:32] @ v[:32].T)
    assert found.weights == pytest.approx(float(eigenvalues[-1] / eigenvalues[0]), rel=1e-6)


def test_theorem_3_fails_as_printed():
    v, m = counterexample()
    found = condition_number(v.T), condition_number(group_means(v, m).T)
    assert found[0] < 1.05
    assert found[1] > 1e4


@pytest.mark.parametrize(
    "method", ["cca:window=20,group_size=4", "dga:window=3", "streaming_llm:sink=2,window=9", "dense"]
)
def test_keys_are_those_that_an_attention_reads(method):
    method = condense.Method.parse(method)
    for length in (5, 30, 77):
        plan_spans = method.layout.rule.spans(length)
        assert keys_read(method, length) == sum(hi - lo for lo, hi in plan_spans)
    assert keys_read(condense.CCA(window=20, group_size=4), 77) == 14 + 21  # 57 // 4 entries, 20 + 57 % 4 tokens
    assert keys_read(condense.Dense(), 77) == 77


def test_keys_of_recall_hold_the_open_groups():
    recall = condense.Recall(window=20, group_size=4, num_recall=3)
    assert keys_read(recall, 77) == 21 + 3 * 4 + 11  # the window, the open ones of 14 groups, entries of the others
    assert keys_read(recall.replace(unchosen="drop"), 77) == 21 + 3 * 4
    assert keys_read(recall, 20) == 20


@pytest.mark.parametrize("method", [condense.SnapKV(), condense.VerticalSlash(), condense.FlexPrefill()])
def test_methods_that_choose_by_the_prompt_have_no_known_number_of_keys(method):
    with pytest.raises(ValueError, match="tokens alone"):
        keys_read(method, 77)


def test_cost_is_counted_for_the_last_query_and_the_mean():
    costs = measure_cost(condense.Dense(), [32, 64])
    assert [(c.length, c.keys, c.mean_keys) for c in costs] == [(32, 32, 16.5), (64, 64, 32.5)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("sparsity", "--length", "60", "--length", "100", "--sequences", "2"),
        ("noise", "--length", "40", "--sequences", "1", "--method", "dense", "--method", "cca:window=8"),
        ("conditioning",),
        ("cost", "--length", "64", "--length", "128"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_write_numbers_and_a_picture(arguments, monkeypatch, tmp_path, capsys):
    numbers, picture = tmp_path / "out.json", tmp_path / "out.png"
    outputs = ["--json", str(numbers), "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", ["condense", "analyze", *arguments, *outputs])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code, capsys.readouterr().err
    assert json.loads(numbers.read_text())["results"].get("model") == (None if arguments[0] == "cost" else "bundled")
    assert picture.read_bytes().startswith(b"\x89PNG")
