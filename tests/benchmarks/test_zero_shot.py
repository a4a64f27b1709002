"""The study of models that were not trained for it: methods on trial, reading over a changed cache, and its page."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from models import tiny

import condense
from condense.models.inspect import inspect

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "zero_shot"))

import continued
import readings
import rows
import shares_page
import shares_tables
import trial

ROOT = Path(__file__).parents[2]
IDS = tiny.tokens(1, 60)


def test_all_heads_recall_or_none():
    model = tiny.model("llama")
    recall = condense.Recall(group_size=4, window=8, num_recall=2, rep_bias="log_size")
    pooled = condense.CCA(group_size=4, window=8, key_pooling="mean", value_pooling="mean", rep_bias="log_size")
    settings = {name: value for name, value in recall.to_dict().items() if name != "method"}
    heads = range(model.config.num_key_value_heads)
    for chosen, same in ((tuple(heads), recall), ((), pooled)):
        with condense.use(model, same):
            wanted = tiny.logits(model, IDS)
        with condense.use(model, trial.HeadRecall(**settings, heads=chosen)):
            assert torch.allclose(tiny.logits(model, IDS), wanted, atol=1e-10)


def test_the_rest_of_a_text_over_its_cache():
    model = tiny.model("llama")
    with torch.no_grad():
        stock = model(IDS).logits[0]
        same = continued._read(model, IDS[0], 40, None)
        assert torch.allclose(same, stock[39:-1], atol=1e-10)
        with condense.use(model, condense.SnapKV(budget=20, window=4)):
            evicted = continued._read(model, IDS[0], 40, None)
    assert torch.allclose(evicted[0], stock[39], atol=1e-10)  # the prompt is read with dense attention
    assert not torch.allclose(evicted[1:], stock[40:-1], atol=1e-3)


def test_bytes_of_a_cache_in_fewer_bits():
    # 4 bits, and per 64 tokens a step and a zero of each channel and of each value: 4.5 of 16 bits
    assert continued.FewerBits(4).share(64 * 1000, 64) == pytest.approx(4.5 / 16, rel=0.01)
    model = tiny.model("llama").to(torch.bfloat16)
    with torch.no_grad():
        cache = model(tiny.tokens(1, 300), use_cache=True).past_key_values
    before = [layer.keys.clone() for layer in cache.layers]
    continued.FewerBits(8)(cache)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys[:, :, 128:], keys[:, :, 128:])
        assert not torch.equal(layer.keys, keys)
        assert torch.allclose(layer.keys, keys, atol=0.05)


@pytest.mark.parametrize("length", [4096, 16384])
def test_what_is_chosen_from_reaches_the_goals(length):
    model = condense.demo_model()[0]
    for place, configs in rows.calibrations(length, 2, 0, rows.POOLED).items():
        for config in configs:
            kept = [inspect(model, method, length)[0] for method in config.candidates]
            assert all(row.host_bytes == 0 for row in kept) or place == "host"
            least = min(row.bytes for row in kept) / kept[0].dense_bytes
            assert length < 16384 or config.cache is None or config.cache > least


def test_what_is_measured_on_latents_can_be():
    model = tiny.model("deepseek_v3")
    for method in {**rows.methods(1024, rows.LATENT), **rows.nearest(1024)}.values():
        assert inspect(model, method, 1024)
    assert list(rows.calibrations(1024, 2, 0, rows.LATENT)) == ["host", "device"]


def test_what_comes_nearest_to_the_goals_is_small_enough():
    model = condense.demo_model()[0].bfloat16()
    reports = {name: inspect(model, method, 16384)[0] for name, method in rows.nearest(16384).items()}
    shares = {name: row.bytes / row.dense_bytes for name, row in reports.items()}
    assert shares["recall finer index"] > 0.12
    assert shares["recall finer index, entries of 4 bits, more open"] < 0.09
    assert all((row.host_bytes == 0) == ("store" in name or name == "dense") for name, row in reports.items())


def _run(seed, **losses):
    parts = [{"start": start, "stop": stop} for start, stop in ((0, 8), (8, 12), (12, 16))]
    text = [
        {"name": name, "loss": sum(of) / 3, "by_position": [p | {"loss": x} for p, x in zip(parts, of, strict=True)]}
        for name, of in losses.items()
    ]
    return {
        "architecture": "llama",
        "seed": seed,
        "length": 16,
        "part": "methods",
        "text": text,
        "retrieval": [{"name": name, "exact": {"share": 0.5}} for name in losses],
        "shares": {name: [1 / (i + 1), 0.0] for i, name in enumerate(losses)},
    }


def test_the_page_shows_losses_above_dense_and_their_spread():
    runs = [_run(0, dense=(3, 2, 1), window=(3, 3, 3)), _run(1, dense=(3, 2, 1), window=(3, 4, 4))]
    found = readings.by_label(runs)
    assert [row.half for row in found["window"]] == [1.5, 2.5]
    table = shares_tables.methods(found)
    assert "| window | 50.0% | 0.0% | 0.500 |" in table
    assert "| +2.000 (+1.500 to +2.500) | +2.500 (+2.000 to +3.000) |" in table


def test_methods_that_change_a_cache_have_a_loss_of_the_last_tokens_only():
    run = _run(0, dense=(3, 2, 1))
    names = ("dense", 2.0, 0.5, None), ("snapkv 5%", 2.25, 0.25, 0.75), ("dense cache of 4 bits", 2.0, 0.5, None)
    keys = ("name", "loss", "found", "found_asked_in_prompt")
    run["continued"] = [dict(zip(keys, of, strict=True)) for of in names]
    run["shares"] |= {"snapkv 5%": [0.05, 0.0], "dense cache of 4 bits": [0.3, 0.0]}
    table = shares_tables.methods(readings.by_label([run]))
    assert "| snapkv 5% | 5.0% | 0.0% | 0.250 |  |  | +0.250 |" in table
    assert "| snapkv 5%, knowing the question | 5.0% | 0.0% | 0.750 |  |  | +0.250 |" in table
    assert "| dense cache of 4 bits | 30.0% | 0.0% | 0.500 |  |  | +0.000 |" in table


def test_at_equal_bytes_each_kind_shows_its_best_row():
    row = readings.Row(0.08, 0.0, 0.5, 0.1, 0.1, 0.2)
    small = row._replace(share=0.0505, found=0.495, last=0.1)
    rows = {"dense": [row._replace(share=1.0, found=1.0)], "cca g=16": [row], "window 5%": [small], "cca g=32": [small]}
    table = shares_tables.equal(rows)
    # a row may be a little larger; within one number in a hundred the loss decides
    assert "| window (StreamingLLM) | 0.495, +0.100 | 0.495, +0.100 | 0.495, +0.100 | 0.495, +0.100 |" in table
    assert "| pooled: CCA | 0.495, +0.100 | 0.495, +0.100 |" in table
    assert "SnapKV" not in table
    rows["cca g=32"] = [small._replace(found=0.2)]
    assert "| pooled: CCA | 0.200, +0.100 | 0.500, +0.200 |" in shares_tables.equal(rows)


def test_heads_stand_beside_whole_layers_of_as_many():
    points = [{"heads": n, "by_head": {"kl": 0.1, "found": 0.5}} for n in (0, 3)]
    points[0]["by_layer"] = {"kl": 0.2, "found": 0.25}
    table = shares_tables.heads([{"points": points}])
    assert "| 0 | 0.1000 | 0.500 | 0.2000 | 0.250 |" in table
    assert "| 3 | 0.1000 | 0.500 |  |  |" in table


def test_calibrated_rows_are_held_against_their_own_dense_ones():
    run = _run(0, dense=(3, 2, 1), **{"calibrated, host, 5.0%": (3, 3, 3)}) | {"part": "calibrated"}
    run["choices"] = {
        "calibrated, host, 5.0%": "Recall(index_size=8, unchosen='drop') in layers 0; CCA(group_size=32) in layers 1"
    }
    met = {"held_out": "loses 0.0264±0.0040 nats, finds 113 of 128 (dense 117)"}
    run["goals"] = {"host": {"0.1%": "cache: too small", "5.0%": met, "layers": []}}
    assert list(readings.by_label([run])) == ["dense", "calibrated, host, 5.0%"]
    # in a table with the methods dense attention stands once per seed
    assert len(readings.by_label([_run(0, dense=(3, 2, 1)), run])["dense"]) == 1
    table = shares_tables.chosen([run])
    layers = "Recall without entries, finer index: 0; CCA 32: 1"
    losses = "+1.000 | +1.500 | 0.0264±0.0040, 113 of 117"
    assert f"| calibrated, host, 5.0% | 0 | 50.0% | 0.0% | 1.000 | {losses} | {layers} |" in table
    assert "| calibrated, host, 0.1% | 0 |  |  |  |  |  |  | cache: too small |" in table


def _calibrated(seed, found, held_out):
    labels = (
        "calibrated, host, 9.0%",
        "calibrated, host, 5.0%",
        "calibrated, device, 16.0%",
        "calibrated, device, 25.0%",
    )
    run = _run(seed, dense=(3, 2, 1), **dict.fromkeys(labels, (3.03, 2.0, 1.0))) | {"part": "calibrated"}
    for entry in run["retrieval"][1:]:
        entry["exact"]["share"] *= found
    run["goals"] = {"host": {}, "device": {}}
    for label in labels:
        _, place, goal = label.split(", ")
        run["goals"][place][goal] = {"held_out": f"loses 0.0264±0.0040 nats, finds {held_out} of 128 (dense 100)"}
    return run


def test_seeds_that_meet_the_goals_are_counted():
    runs = [_calibrated(0, 0.99, 99), _calibrated(1, 0.98, 98), _calibrated(2, 1.0, 98)]
    table = shares_tables.goals(runs)
    losses = "+0.010, +0.010, +0.010 | +0.000, +0.000, +0.000"
    row = f"{losses} | 0.990, 0.980, 1.000 | 2 of 3 | 0.990, 0.980, 0.980 | 1 of 3 |"
    assert f"| host store, 9 %: calibrated | 50.0%, 50.0%, 50.0% | {row}" in table
    for run in runs:
        run["text"][1]["loss"] += 0.02  # 0.03 above dense attention
    assert "| 0 of 3 | 0.990, 0.980, 0.980 | 1 of 3 |" in shares_tables.goals(runs)


def test_goals_may_be_met_by_one_method_in_all_layers():
    label = "recall finer index, entries of 4 bits"
    nearest = [_run(seed, dense=(3, 2, 1), **{label: (3.03, 2, 1)}) | {"part": "nearest"} for seed in (0, 1)]
    nearest[1]["retrieval"][1]["exact"]["share"] *= 0.98
    table = shares_tables.goals([*nearest, _calibrated(0, 1.0, 99), _calibrated(1, 1.0, 99)])
    row = "+0.010, +0.010 | +0.000, +0.000 | 1.000, 0.980 | 1 of 2 |  |  |"
    assert f"| host store, 9 %: `Recall` in all layers | 50.0%, 50.0% | {row}" in table
    assert "| host store, 9 %: calibrated | 50.0%, 50.0% |" in table


def _opened(seed, length, **losses):
    run = _run(seed, dense=(3, 2, 1), **{f"r={r[1:]}": (3, 2 + of, 1 + of) for r, of in losses.items()})
    return run | {"part": "opened", "length": length}


def test_groups_that_must_be_open_stand_seed_by_seed():
    runs = [
        _opened(0, 2048, r4=0.02, r16=0.0),
        _opened(1, 2048, r4=0.04, r16=0.02),  # not enough
        _opened(0, 8192, r4=0.03, r16=0.01),
        _opened(1, 8192, r4=0.02, r16=0.0),
    ]
    table = shares_tables.needed({"gqa4": runs})
    assert "|  | 2,048 | 8,192 | 131,072, predicted |" in table
    # twice as many for four times the length: sixteen times the length, four times as many
    assert "| four query heads per KV head | 8, ? | 16, 8 | 64, ? |" in table
    rows = shares_tables.opened([run for run in runs if run["seed"] == 0])
    assert "| 2,048 | 112 | 4 | 1.000 | +0.013 | +0.020 |" in rows
    assert "| 8,192 | 496 | 16 | 1.000 | +0.007 | +0.010 |" in rows


def test_an_adaptation_shows_dense_attention_before_it():
    run = _run(0, dense=(3, 2, 1), cca=(3, 2.3, 1.3)) | {"part": "adapted"}
    run["before"] = {
        "text": _run(0, dense=(3.3, 2, 1))["text"],
        "retrieval": [{"name": "dense", "exact": {"share": 1.0}}],
    }
    table = shares_tables.methods(readings.by_label([run]))
    assert "| dense, before | 100.0% | 0.0% | 1.000 | +0.100 | +0.000 | +0.000 |" in table
    assert "| cca | 50.0% | 0.0% | 0.500 | +0.200 | +0.300 | +0.300 |" in table


def test_a_table_is_of_the_first_file_that_has_it_all(tmp_path, monkeypatch):
    folder = tmp_path / "study"
    folder.mkdir()
    monkeypatch.setattr(shares_page, "__file__", str(folder / "shares_page.py"))
    measured = {"device": "a GPU", "torch": "2", "transformers": "5", "date": "2026-11-22", "commit": "0123456789abc"}
    results = []
    for name, step in (("first-1Z", 1.0), ("second-2Z", 2.0), ("third-3Z", 3.0)):
        run = _run(0, dense=(3, 2, 1), cca=(3, 2 + step, 1 + step)) | {"part": "adapted" if step == 1 else "calibrated"}
        results.append(tmp_path / f"{name}.json")
        results[-1].write_text(json.dumps({"results": {"measured": measured, "runs": [run]}}))
    page = folder / "page.md"
    page.write_text(
        "{{table calibrated llama 16}}\n{{table adapted llama 16}}\n{{table calibrated llama 16 3Z}}\n{{origin}}"
    )
    shares_page.write_page(results, tmp_path / "page.md")
    losses = re.findall(r"\| cca \|.*\| (\S+) \|", (tmp_path / "page.md").read_text())
    assert losses == ["+2.000", "+1.000", "+3.000"]
    page.write_text("{{table calibrated llama 16 1Z}}")
    with pytest.raises(ValueError, match="results: no runs of calibrated llama 16 1Z"):
        shares_page.write_page(results, tmp_path / "page.md")


def test_the_page_is_as_the_results_fill_it(tmp_path):
    page = ROOT / "docs" / "studies" / "zero-shot.md"
    results = [ROOT / name for name in re.findall(r"`(benchmarks/results/zero-shot-\S+\.json)`", page.read_text())]
    shares_page.write_page(results, tmp_path / page.name)
    assert (tmp_path / page.name).read_text() == page.read_text()


def test_the_page_says_what_is_missing(tmp_path):
    results = tmp_path / "r.json"
    content = {"measured": {}, "runs": []}
    results.write_text(json.dumps({"results": content}))
    with pytest.raises(ValueError, match="results: no runs of"):
        shares_page.write_page([results], tmp_path / "page.md")
