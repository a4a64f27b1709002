"""The study of what transfers: its texts, its attention, and that its evaluation sees what it must."""

import json
from functools import partial

import adapted
import cells
import contenders
import makes
import numpy as np
import one_model
import pytest
import reading
import reduced
import texts
import torch
import transformers
import variants
import weights
from torch.nn import functional as F

import condense

_SMALL = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 64}
SMALL = contenders.DEVICE.replace(prompt="exact", group_size=8, window=16, store_bits=16, min_recall=0, num_recall=0.1)


@pytest.fixture(scope="module")
def drawn():
    tokenizer = one_model._tokenizer()
    text = condense.demo.demo_text().text
    return texts.Texts(np.array(tokenizer(text)["input_ids"], np.uint16), tokenizer, "held_out")


@pytest.fixture(scope="module")
def held(drawn):
    return texts.held_out(drawn, drawn, 256, (2, 1, 2))


def tiny(make: str, **changes):
    changes = _SMALL | changes
    if make.startswith("gemma3"):
        kinds = ["sliding_attention", "full_attention"] * (changes["num_hidden_layers"] // 2)
        changes |= {"sliding_window": 32, "layer_types": kinds}
    return makes.new_model(make, 0, **changes).double().eval()


def read(model, arm, held):
    reference = reading.Reference()
    return reading.forced(model, None, held, reference), reading.forced(model, arm, held, reference)


@pytest.mark.parametrize("make", ["llama-77m", "gemma3-44m", "mla-28m"])
def test_all_groups_open_is_dense_attention(make, held):
    dense, opened = read(tiny(make), SMALL.replace(num_recall=1.0), held)
    for a, b in zip(opened["prose"] + opened["code"], dense["prose"] + dense["code"], strict=True):
        # float32 losses of float64 logits, summed over at most 256 tokens
        assert a["kl"] < 1e-5
        for name in ("other", "copy", "identifier"):
            assert a.get(name, [0])[0] == pytest.approx(b.get(name, [0])[0], abs=1e-2)
    assert opened["asked"] == dense["asked"]


def test_an_arm_with_a_planted_bug_is_seen(held):
    def shifted(module, q, k, v, scale):  # every query reads the values one token too late
        return F.scaled_dot_product_attention(q, k, v.roll(1, 2), is_causal=True, scale=scale, enable_gqa=True)

    _, broken = read(tiny("llama-77m"), shifted, held)
    assert min(text["kl"] for text in broken["prose"]) > 1e-5


def test_weights_come_back_as_they_were_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_PART", 10**5)
    model, other = (makes.new_model("qwen3-83m", seed, **_SMALL) for seed in (0, 1))
    before = [p.detach().clone() for p in model.parameters()]
    weights.save(model, tmp_path / "w", 7)
    weights.load(other, tmp_path / "w")
    for a, b, c in zip(before, model.parameters(), other.parameters(), strict=True):
        assert (b == c).all()
        # half of a step of which 63 reach the largest number, and the step's own rounding
        assert (a - b).abs().max() <= a.abs().max() / 63 * 0.7
    parts = [part.stat().st_size for part in tmp_path.glob("w.*")]
    assert sum(parts) < sum(p.numel() for p in model.parameters())
    assert max(parts) == 10**5


def test_answers_are_what_the_text_says(drawn):
    rng = np.random.default_rng(1)
    sequence = drawn.asking(rng, 1024, {"number": 3, "shared": 3, "several": 2, "chain": 2})
    assert len(sequence.ids) == 1024
    text = drawn._tokenizer.decode(sequence.ids)
    assert sorted({kind for kind, _, _ in sequence.answers}) == sorted(texts.KINDS)
    for _, start, stop in sequence.answers:
        number = drawn._tokenizer.decode(sequence.ids[start:stop]).strip()
        assert number.isdigit()
        assert text.count(f" is {number}.") >= 1
    copied = drawn.copying(rng, 512, 64)
    text, end = copied.ids[:448].tobytes(), copied.ids[448:].tobytes()
    assert end in text
    code = texts.Texts(np.tile(drawn._encode("int some_name = other_name;\n" * 3), 200), drawn._tokenizer, "trained")
    assert not code.code(rng, 512).far.any()  # names that come again and again are never far


@pytest.mark.parametrize("make", makes.MAKES)
def test_each_make_learns_from_the_first_steps(make):
    # as deep as it is, as gradients that overflow do so by depth; texts begin with the separator, as some drawn ones do
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2 if make.startswith("mla") else 1, "head_dim": 32}
    changes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64} | heads
    model = makes.new_model(make, 0, **changes).train()
    optimizer, rows = makes.new_optimizer(model, 2e-3), torch.arange(4)[:, None]
    ids = (3 * torch.arange(16) + rows) % 8 * torch.arange(16).bool()
    losses = [makes.step(model, optimizer, ids, torch.ones(ids.shape), True)["loss"] for _ in range(18)]
    assert losses[-1] < 0.7 * losses[0]


def record(right: int, nats: float, of: int = 100):
    prose = {name: [nats * of, 50, of] for name in ("key", "other", "copy")} | {"kl": nats - 2}
    return {"prose": [prose] * 8, "code": [], "asked": [{"number": "1" * right + "0" * (of - right)}] * 8}


def test_worst_cells_and_what_fails():
    dense = record(98, 2.0)
    good, forgets, blurs = record(98, 2.005), record(94, 2.0), record(98, 2.05)
    for bad, name in ((forgets, "number"), (blurs, "key")):
        assert not cells.cells(bad, dense)[name].passes(name in cells.TASKS)
    assert all(cell.passes(name in cells.TASKS) for name, cell in cells.cells(good, dense).items())
    results = {("a", 16384): {"dense": dense, "x": good}, ("b", 16384): {"dense": dense, "x": forgets}}
    worst = cells.worst(results, (16384,))["x"]
    assert worst["tasks"][1:] == ("number", "b", 16384)
    assert worst["failed"] == [("number", "b", 16384)]
    # a task that dense attention does not master does not count
    assert "number" not in cells.cells(record(10, 2.0), record(50, 2.0))


def test_a_model_that_did_not_learn_has_no_rows(tmp_path):
    arms = {"dense": record(98, 2.0), "x": record(94, 2.05)}
    for make, last in (("a", 2.0), ("b", 8.3)):
        steps = [{"step": i, "tokens": 8 * i, "loss": loss, "time": 0} for i, loss in enumerate((8.3, last))]
        lines = [{"parameters": 1, "torch": "2", "config": {"transformers_version": "5"}}, {"trained_seconds": 1.0}]
        lines += [{"length": 16384, "arm": arm, **of} for arm, of in arms.items()]
        of_make = [{"make": make, "seed": 0, "time": 0} | line for line in lines]
        for name, content in ((f"{make}.jsonl", of_make), (f"{make}-training.jsonl", steps)):
            (tmp_path / name).write_text("\n".join(map(json.dumps, content)))
    reduced.add(tmp_path / "results.json", tmp_path, study="transfer", device="cpu", commit="0")
    (document,) = json.loads((tmp_path / "results.json").read_text()).values()
    learned, other = document["results"]["models"]
    assert "rows" not in other
    row = learned["rows"][1]
    assert row["failed"] == ["key", "other", "copy", "number"]
    assert (row["key"][0], row["kl"]) == pytest.approx((0.05, 0.05))


def test_training_skips_a_step_that_overflows_and_fails_after_several(drawn, monkeypatch):
    model, log, real, calls = makes.new_model("qwen3-83m", 0, **_SMALL), [], makes.step, iter(range(10**9))
    bad = {2}

    def step(*arguments):
        if next(calls) in bad:
            raise FloatingPointError("gradient")
        return real(*arguments)

    monkeypatch.setattr(makes, "step", step)
    monkeypatch.setattr(makes.time, "monotonic", partial(next, iter(range(10**9))))  # each look is a second later
    given = {"seed": 0, "workers": 0, "stages": ((128, 0.5, 128), (160, 0.5, 160)), "log": log.append}
    makes.train(model, drawn, 16.0, **given)
    assert [entry["step"] for entry in log if "skipped" in entry] == [3]
    assert {entry["length"] for entry in log if "length" in entry} == {128, 160}
    assert makes.rate_at(0.1, 1.0) == 1.0 > makes.rate_at(0.9, 1.0) > makes.rate_at(1.0, 1.0) > 0
    bad |= set(range(1000, 10**5))
    calls = iter(range(1000, 10**9))
    with pytest.raises(FloatingPointError, match="gradient"):
        makes.train(model, drawn, 10.0**6, **given)


def test_what_no_arm_beats_at_its_bytes(tmp_path):
    arms = {"dense": record(98, 2.0), "a": record(90, 2.1), "b": record(80, 2.2), "c": record(97, 2.05)}
    sizes = {"dense": 1.0, "a": 0.2, "b": 0.3, "c": 0.4}
    fixed = {"make": "x", "length": 16384}
    lines = [fixed | {"arm": name, "read": size, "device": size} | arms[name] for name, size in sizes.items()]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "worst task): 20.0% a (+0.100, +0.100, 8.2%); 40.0% c (" in cells.page([tmp_path / "x.jsonl"])


@pytest.mark.parametrize(("study", "most"), [("transfer", 14), ("reread", 11)])
def test_every_arm_is_measured(study, most, drawn):
    held, records, reference = texts.held_out(drawn, drawn, 1100, (1, 1, 1)), [], reading.Reference()
    small = tiny("gemma3-44m", num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    place = one_model._Place(small.float(), 1e18, records.append)
    for group in contenders.arms_of(study, 32768):
        place.measure(1100, group, held, reference)
    assert len(records) == most
    assert [record for record in records if {"error", "costs_error"} & set(record)] == []


def test_arms_that_open_all_groups_are_left_out():
    """Of 1,008 groups, 1,024 are all; but in prompts that share choices 512 are open."""
    (_, short), (_, longer) = (contenders.arms_of("transfer", length) for length in (8192, 16384))
    assert not {"dropped", "16 bits"} & short.keys()
    assert {"dropped", "16 bits"} <= longer.keys()
    assert not {"dense prompts", "prompts by Recall"} & longer.keys()


def test_a_dense_cache_in_many_bits_is_dense_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 400, 32, generator=generator) for n in (4, 2, 2))
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    error = [float((variants.Cache(bits)(None, q, k, v, None) - dense).abs().max()) for bits in (8, 4, 3)]
    assert error[0] < 0.05
    assert error[0] < error[1] < error[2]
    short = [x[:, :, :100] for x in (q, k, v)]  # all tokens are among the newest
    assert torch.allclose(variants.Cache()(None, *short, None), dense[:, :, :100], atol=1e-6)
    # bytes of a token that is not among the newest: 4 bits, of keys a step and a zero per channel of 64 tokens
    assert variants.Cache().costs(2**20, 128)["read"] == pytest.approx(140 / 512, rel=1e-2)


@pytest.mark.parametrize("make", ["llama-77m", "gemma3-44m", "mla-28m"])
@pytest.mark.parametrize("prompt", [100, 163])
def test_what_follows_a_prompt_is_read_as_steps_read_it(prompt, make, drawn):
    """All groups are open in the first layer, of Gemma 3 the first without a sliding window."""
    # past several ends of groups
    ids = torch.from_numpy(drawn.plain(np.random.default_rng(0), 180).ids)[: prompt + 30]
    model = tiny(make, num_hidden_layers=4)
    dense, got = (reading.logits_of(model, arm, ids, prompt) for arm in (None, SMALL))
    assert dense.shape == got.shape == (len(ids) + 1 - prompt, 4096)
    torch.testing.assert_close(got[0], dense[0], rtol=0, atol=1e-12)
    assert float((got[1:] - dense[1:]).abs().max()) > 1e-6
    assert model.config._attn_implementation == "transfer"
    model.set_attn_implementation("sdpa")
    with condense.use(model, SMALL), torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        steps = [model(part[None], past_key_values=cache).logits[0, -1] for part in (ids[:prompt], *ids[prompt:, None])]
    torch.testing.assert_close(got, torch.stack(steps), rtol=0, atol=1e-9)


def test_forms_are_learned_from_the_dense_self_in_growing_groups(monkeypatch):
    model = makes.new_model("llama-77m", 0, **_SMALL | {"num_hidden_layers": 4})
    before, seen = model.lm_head.weight.detach().clone(), []
    form = {"3": adapted.OPENED, "rest": adapted.POOLED.replace(window=16)}
    batch = torch.randint(4096, (1, 64)), torch.ones(1, 64)
    use = adapted.use
    monkeypatch.setattr(adapted, "use", lambda model, methods: seen.append(methods) or use(model, methods))
    adapted.adapt(model, form, [batch] * 9, lambda step: step / 6, lambda record: seen.append(record["kl"]), 5e-4)
    assert seen.pop(1) > 0  # the first step already differs from dense attention
    assert [methods["rest"].group_size for methods in seen] == [4, 4, 8, 8, 16, 16]
    assert {methods["3"] for methods in seen} == {condense.Dense()}
    assert adapted.forms_of(8)["pooled, every fourth Recall"] == {"3,7": adapted.OPENED, "rest": adapted.POOLED}
    assert not torch.equal(model.lm_head.weight, before)
