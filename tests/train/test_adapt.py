"""Distillation, growing groups, partial training and adapters, the plan, and what stops a run."""

import dataclasses
import errno
import itertools
import json
import math
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from cli.test_commands import run_here
from models import tiny
from peft import PeftModel
from safetensors.torch import load_file
from small_models import saved_with_tokenizer, tiny_llama
from train.runs import METHOD, adaptation, interrupted_at, logged, refused
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

import condense
from condense.files import whole_file
from condense.methods import methods_in, settings_of
from condense.models import condensed_layers
from condense.tasks.corpus import check_vocabulary
from condense.train import PRESETS, RECIPES, PhaseConfig, read_recipe, run_training
from condense.train import loss as loss_module
from condense.train import phase as phase_module
from condense.train import run as run_module
from condense.train import trainer as trainer_module
from condense.train.loss import token_loss
from condense.train.optimizer import projections, set_trained
from condense.train.phase import forecast, newest_checkpoint, plan_of
from condense.train.record import summary
from condense.train.trainer import COMPLETE, MixedTrainer

# transformers' own, of PEFT
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
GATHERING = {
    ("FSDP_VERSION", "1"): "FSDP_VERSION: wanted 2",
    ("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT"): "others gather weights and optimizer on one process .*, got FULL",
    ("FSDP_AUTO_WRAP_POLICY", "NO_WRAP"): "FSDP_AUTO_WRAP_POLICY: wanted TRANSFORMER_BASED_WRAP",
    ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true"): "FSDP_CPU_RAM_EFFICIENT_LOADING: wanted false",
    ("FSDP_VERSION", "2"): "ACCELERATE_USE_FSDP: wanted processes on GPUs, got none",
}
BAD_FILES = [
    ("stepps = 40", r"recipe: wanted fields of .*; got stepps; close: steps.* in .*recipe.toml"),
    ("steps = ", r"recipe: wanted a TOML file, got .*recipe.toml"),
    ('data = "a.txt"', r"data: wanted a list, got 'a.txt' in .*recipe.toml"),
    ("data = [3]", r"data: wanted a list of texts, got \[3\] in .*recipe.toml"),
    ("method = 3", r"method: wanted a text, got 3 in .*recipe.toml"),
    ("data_weights = [1, 2]", "data_weights: wanted one for each of 1 data files, got 2"),
    ('steps = "40"', "steps must be an integer"),
    ('gradient_checkpointing = "no"', "gradient_checkpointing must be True or False"),
]
PROJECTIONS = [
    ("llama", {"q_proj", "k_proj", "v_proj"}, {"o_proj"}),
    ("gpt2", {"c_attn"}, {"c_proj"}),
    ("deepseek_v3", {"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}, {"o_proj"}),
]


@pytest.fixture
def base(tmp_path, text):
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    saved_with_tokenizer(tiny_llama(initializer_range=0.2), tmp_path / "base")
    return tmp_path


@pytest.mark.parametrize("block", [7, 100, 2**24])
@pytest.mark.parametrize("distill", [None, 0.0, 0.7, 1.0])
def test_loss_and_gradient_are_the_formulas(block, distill, monkeypatch):
    monkeypatch.setattr(loss_module, "_BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 11, 13, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    targets = torch.randint(13, (11,), generator=generator)
    weights = torch.tensor([0.0, 1, 5, 1, 1, 5, 5, 1, 1, 1, 1])
    log_p, log_t = logits.log_softmax(-1), teacher.log_softmax(-1)
    ce = -log_p.gather(1, targets[:, None])[:, 0]
    kl = (log_t.exp() * (log_t - log_p)).sum(-1)
    share = distill or 0.0
    expected = (weights * ((1 - share) * ce + share * kl)).sum()
    found = token_loss(logits, targets, weights, None if distill is None else teacher.clone(), share)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.ce, (weights * ce).sum())
    torch.testing.assert_close(found.kl, (weights * kl).sum() * (distill is not None))
    answered = weights > 1
    assert [found.weights, found.answers] == [weights.sum(), answered.sum()]
    assert found.right == ((logits.argmax(-1) == targets) & answered).sum()
    gradients = [torch.autograd.grad(3 * value, logits)[0] for value in (expected, found.loss)]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_the_loss_of_low_precision_logits_is_as_exact_as_pytorchs():
    generator = torch.Generator().manual_seed(0)
    logits, teacher = 4 * torch.randn(2, 64, 501, generator=generator)
    logits, teacher = logits.bfloat16().requires_grad_(), teacher.bfloat16()
    targets = torch.randint(501, (64,), generator=generator)
    results = {}
    for dtype in (torch.float64, torch.float32):
        log_p, log_t = logits.to(dtype).log_softmax(-1), teacher.to(dtype).log_softmax(-1)
        value = (log_t.exp() * (log_t - log_p)).sum()
        results[dtype] = value, torch.autograd.grad(value, logits)[0].double()
    loss = token_loss(logits, targets, torch.ones(64), teacher, 1.0).loss
    exact, plain = results[torch.float64], results[torch.float32]
    assert abs(loss - exact[0]) <= 2 * abs(plain[0] - exact[0]) + 2**-23 * abs(exact[0])
    error = (torch.autograd.grad(loss, logits)[0].double() - exact[1]).abs().max()
    assert error <= 2 * max((plain[1] - exact[1]).abs().max(), 2**-9 * exact[1].abs().max())


def test_a_loss_goes_backward_once():
    """Its gradient is scaled in place, so a second time raises rather than scale it twice."""
    logits, targets = torch.randn(4, 9, requires_grad=True), torch.arange(4)
    loss = token_loss(logits, targets, torch.ones(4)).loss
    (2 * loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = token_loss(logits, targets, torch.ones(4)).loss
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(gradient.sum(), logits)


def test_groups_grow_over_two_thirds_of_the_steps():
    text = "cca:group_size=16,window=16,summary=streaming"
    phase = PhaseConfig("p", 18, 128, 1, mix="condensed", method=text, group_sizes=(4, 8))
    assert [phase.attention_at(step).group_size for step in range(18)] == [4] * 4 + [8] * 4 + [16] * 10
    assert phase.attention_at(0) == METHOD.replace(group_size=4)
    mixed = dataclasses.replace(phase, mix="alternate")
    assert [mixed.attention_at(step) is None for step in range(4)] == [True, False, True, False]
    assert dataclasses.replace(phase, mix="dense", method=None, group_sizes=()).attention_at(3) is None


def test_of_several_methods_those_without_gradients_are_dense_in_training():
    far, pooled, window = (
        condense.Recall(window=16, store_bits=4),
        METHOD.replace(group_size=8),
        condense.StreamingLLM(window=20),
    )
    phase = PhaseConfig(
        "p", 18, 128, 1, mix="condensed", method={0: far, "1,2": METHOD, 3: pooled, "rest": window}, group_sizes=(4, 8)
    )
    steps = [phase.attention_at(step) for step in (0, 4, 8)]
    assert [[each["1,2"].group_size, each[3].group_size] for each in steps] == [[4, 4], [8, 8], [16, 8]]
    assert {each[0] for each in steps} == {condense.Dense()}
    assert {each["rest"] for each in steps} == {window}
    assert steps[2]["1,2"] == METHOD
    # one that gives gradients is trained itself
    itself = far.replace(store_bits=16, prompt="recall")
    assert dataclasses.replace(phase, method={0: itself, 1: METHOD}).attention_at(9)[0] == itself
    for others in (far, condense.Dense()):
        with pytest.raises(
            ValueError, match=r"method: wanted a layer whose method gives gradients, got Recall\(.* in l"
        ):
            dataclasses.replace(phase, method={0: far, "rest": others}, group_sizes=())
    with pytest.raises(ValueError, match=r"nothing to learn of itself \(distill\), got Dense"):
        dataclasses.replace(phase, method={"rest": condense.Dense()}, group_sizes=(), distill=1.0)
    with pytest.raises(ValueError, match="group_sizes: wanted ascending sizes below the method's 16, got"):
        dataclasses.replace(phase, group_sizes=(16,))
    with pytest.raises(ValueError, match=r"sequence_length: wanted at least 32 tokens, .* by CCA"):
        dataclasses.replace(phase, sequence_length=31)


@pytest.mark.parametrize("train", ["all", "lora"])
def test_an_allocation_is_adapted_from_its_file_resumes_and_is_saved_as_it_was_given(base, train, capsys):
    choice = {0: condense.Recall(window=16, num_recall=1.0, prompt="shared", store_bits=4), 1: METHOD}
    file = base / "allocation.json"
    file.write_text(json.dumps(settings_of(choice)))
    fields = {"method": f"@{file}", "train": train, "learning_rate": 1e-3}
    other = adaptation(base, **fields | {"method": METHOD})
    whole = run_training(adaptation(base, "whole", **fields))
    broken = adaptation(base, **fields)
    with interrupted_at(4):
        run_training(broken)
    refused("resume: wanted the run that lies in .* got another method;", other, resume=True)
    run_training(broken, resume=True)
    assert "adapt: dense attention is trained in layers 0\n" in capsys.readouterr().out
    weights = [load_file(next(folder.glob("*model.safetensors"))) for folder in (whole, broken.output)]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    phase, entries = logged(whole)
    assert phase["phase"]["group_sizes"] == [4, 8]
    assert entries[0]["condensed_kl"] > 0
    model = AutoModelForCausalLM.from_pretrained(whole)
    assert condensed_layers(model) == choice
    assert methods_in(model.config.condense_adapted) == choice


def test_a_method_that_could_not_be_saved_is_refused_before_the_first_step(base):
    class Unnamed(condense.CCA):
        pass

    refused("Unnamed must have a name of its own", adaptation(base, method={0: METHOD, 1: Unnamed(window=16)}))
    assert not (base / "adapted.work").exists()


@pytest.mark.parametrize("name", PRESETS)
def test_the_papers_adapt_without_what_is_ours(name, tmp_path):
    run = RECIPES["adapt"]([tmp_path / "a"], tmp_path / "b", pretrained="base", **read_recipe(PRESETS[name]))
    (phase,) = run.phases
    assert (phase.distill, phase.group_sizes, phase.task_share, phase.mix) == (0, (), 0, "condensed")


def test_a_recipe_file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('method = "pooled"\nsteps = 40\nkeys = [2, 3]\ngroup_sizes = [2]\ntrain = "lora"\nlora_rank = 4\n')
    run = RECIPES["adapt"]([tmp_path / "a"], tmp_path / "b", pretrained="base", **read_recipe(path))
    (phase,) = run.phases
    assert (phase.keys, phase.group_sizes, phase.warmup_steps, phase.checkpoint_steps) == ((2, 3), (2,), 4, 10)
    assert phase.learning_rate == 3e-4
    assert RECIPES["adapt"](["a"], "b", pretrained="c", method="pooled").phases[0].learning_rate == 3e-5
    assert (run.train, run.lora_rank) == ("lora", 4)
    assert RECIPES["adapt"](["a"], "b", pretrained="~/c", method="pooled").pretrained == Path("~/c").expanduser()
    for name in ("adapt", "smoke"):
        settings = {"pretrained": "c", "method": "pooled"} if name == "adapt" else {}
        tiny.refused("data must be a list or a tuple, got 'text.txt'", RECIPES[name], "text.txt", "b", **settings)
    for name, value in (("stepps", 40), ("train", "half"), ("lora_targets", "mlp"), ("lora_rank", 0)):
        tiny.refused(name, adaptation, tmp_path, **{name: value})


@pytest.mark.parametrize(("line", "message"), BAD_FILES)
def test_bad_recipe_files(tmp_path, line, message):
    path = tmp_path / "recipe.toml"
    path.write_text(line)
    tiny.refused(message, lambda: adaptation(tmp_path, **read_recipe(path)))


def test_the_record_tells_what_is_trained_and_shares_of_the_data_apart(tmp_path):
    settings, files = {"pretrained": "base", "method": "cca", "train": "lora"}, [tmp_path / "a", tmp_path / "b"]
    changes = [{"train": "all"}, {"lora_rank": 2}, {"lora_targets": "qkv"}]
    changes += [{}, {"data_weights": [1, 1]}, {"data_weights": [2, 1]}]
    records = [summary(RECIPES["adapt"](files, tmp_path / "c", **settings | change)) for change in changes]
    assert all(one != other for one, other in itertools.combinations(records, 2))


@pytest.mark.parametrize(("name", "qkv", "output"), PROJECTIONS)
def test_the_attentions_projections(name, qkv, output, tmp_path):
    model = tiny.model(name)
    found = {which: {path.rpartition(".")[2] for path in projections(model, which)} for which in ("qkv", "qkvo")}
    assert found["qkv"] <= qkv
    assert found["qkvo"] == found["qkv"] | output
    set_trained(model, dataclasses.replace(adaptation(tmp_path), train="qkv"))
    trained = {path.rpartition(".")[0] for path, weight in model.named_parameters() if weight.requires_grad}
    assert trained == set(projections(model, "qkv"))


def test_only_the_projections_change_and_the_model_says_what_it_learned(base):
    run_training(adaptation(base, train="qkv", steps=2))
    stock, adapted = (AutoModelForCausalLM.from_pretrained(base / name) for name in ("base", "adapted"))
    assert condensed_layers(adapted) == methods_in(adapted.config.condense_adapted) == dict.fromkeys(range(2), METHOD)
    before, after = stock.state_dict(), adapted.state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(2) for name in "qkv"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_resume_load_condensed_and_merge(base, dtype, monkeypatch):
    whole, broken = (adaptation(base, name, train="lora", lora_rank=2, dtype=dtype) for name in ("whole", "broken"))
    monkeypatch.chdir(base)
    run_training(dataclasses.replace(whole, pretrained="base"))
    monkeypatch.chdir("/")  # where the adapter finds its base too
    with interrupted_at(3):
        run_training(broken)
    run_training(broken, resume=True)
    assert [entry["loss"] for entry in logged(broken.output)[1]] == [entry["loss"] for entry in logged(whole.output)[1]]
    assert not (whole.output / "model.safetensors").exists()
    one, other = (AutoModelForCausalLM.from_pretrained(run.output).state_dict() for run in (whole, broken))
    assert all(torch.equal(one[name], other[name]) for name in one)

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base / "base"), whole.output).eval()
    assert condensed_layers(model) == dict.fromkeys(range(2), METHOD)
    ids = torch.arange(100, 180)[None]
    logits = model(ids, use_cache=False).logits
    model.merge_and_unload().save_pretrained(base / "merged")
    merged = AutoModelForCausalLM.from_pretrained(base / "merged").eval()
    assert condensed_layers(merged) == dict.fromkeys(range(2), METHOD)
    torch.testing.assert_close(merged(ids, use_cache=False).logits, logits)


def test_adapters_on_a_base_that_another_method_condensed_are_refused(base):
    """Both are loaded together."""
    saved_with_tokenizer(condense.apply(tiny_llama(), METHOD.replace(group_size=4)), base / "other")
    refused("a base that is stock or condensed by the adapter's method", adaptation(base, "a", train="lora",
        pretrained=base / "other"))  # fmt: skip
    run_training(adaptation(base, "all", steps=1, pretrained=base / "other"))


def test_the_text_part_of_a_model_of_several_parts_is_adapted(base):
    """Its configuration has no `use_cache`."""
    text = {"vocab_size": 4096, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["full_attention"] * 2}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28}, mm_tokens_per_image=4)
    saved_with_tokenizer(Gemma3ForConditionalGeneration(config), base / "parts")
    output = run_training(adaptation(base, "a", steps=1, pretrained=base / "parts", gradient_checkpointing=True))
    assert condensed_layers(AutoModelForCausalLM.from_pretrained(output))
    assert "use_cache" not in json.loads((output / "config.json").read_text())


def test_the_plan_counts_bytes():
    model = tiny_llama(vocab_size=100, num_hidden_layers=1).to(torch.bfloat16)
    count = sum(weight.numel() for weight in model.parameters())
    phase = PhaseConfig("p", 10, 128, 8, distill=0.5, gradient_accumulation_steps=2)
    sizes = {"weights": 2 * count, "gradients": 2 * count, "optimizer": 12 * count, "teacher": 2 * count}
    sizes["logits"] = 2 * 4 * 128 * 100 * 2
    assert forecast(model, phase) == sizes
    sharded = {"weights": count, "gradients": count, "optimizer": 2 * count, "logits": sizes["logits"] // 4}
    assert forecast(model, phase, processes=4, sharded=True, sharded_teacher=True) == sharded | {"teacher": count // 2}
    assert forecast(model, phase, processes=4, sharded=True) == sharded | {"teacher": 2 * count}
    assert phase.tokens == 10 * 8 * 128
    model.lm_head.requires_grad_(False)
    said = plan_of(model, phase, 1, sizes)
    assert f"trains {(count - 1600) / 1000:.3g}K of {count / 1000:.3g}K parameters, 10 steps, 10.2K tokens" in said


def test_what_does_not_fit_is_refused_before_the_first_step_or_checkpoint(base, monkeypatch):
    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", partialmethod(_full, step=2))
    refused("step 2: could not write .* MiB are free: .*; no checkpoint was written yet", adaptation(base, "full"))
    tiny_llama(vocab_size=300, num_hidden_layers=1).save_pretrained(base / "base")
    wanted = "wanted a tokenizer of the model's 300 tokens at most, got 4096 in"
    refused(f"pretrained: {wanted}", adaptation(base))
    assert f"model: {wanted}" in run_here("generate", "a", "--model", str(base / "base")).stderr
    # embeddings for added tokens, such as that of a picture, may be missing
    tokenizer = AutoTokenizer.from_pretrained(base / "base")
    tokenizer.add_tokens(["<picture>"])
    model = tiny_llama(vocab_size=4096, num_hidden_layers=1)
    check_vocabulary("model", tokenizer, model.config)
    # but not where a text has them
    for part in (model, tokenizer):
        part.save_pretrained(base / "base")
    (base / "text.txt").write_text("a <picture> b\n" * 400)
    refused(r"data: wanted text of the model's 4096 tokens, got '<picture>' \(4096\)", adaptation(base))
    phase = PhaseConfig("p", 1, 128, 4, gradient_accumulation_steps=2)
    tiny.refused(r"batch_size: wanted a multiple of .* 6, got 4", phase.part_size, 3)
    assert not (base / "adapted.work").exists()


def test_bfloat16_adapters_under_fsdp_need_a_torch_that_keeps_two_dtypes_apart(base, monkeypatch):
    for name, value in FSDP2.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(phase_module, "is_torch_version", lambda *_: False)
    wanted = "train: wanted torch 2.13 or newer for bfloat16 adapters under FSDP2"
    refused(wanted, adaptation(base, train="lora", dtype="bfloat16"))


@pytest.mark.parametrize(("setting", "message"), GATHERING.items(), ids=str)
def test_a_sharding_that_gathers_everything_or_nothing_is_refused(base, monkeypatch, setting, message):
    monkeypatch.setattr(MixedTrainer, "training_step", lambda *_: pytest.fail("took a step"))
    for name, value in (*FSDP2.items(), setting):
        monkeypatch.setenv(name, value)
    for resume in (False, True):
        refused(message, adaptation(base), resume=resume)
        assert not adaptation(base).work.exists()


def _not_finite(self, model, inputs, *args, stock=MixedTrainer.compute_loss, step=3, **kwargs):
    loss = stock(self, model, inputs, *args, **kwargs)
    return loss * math.nan if self.state.global_step == step else loss


def _full(self, folder, stock=Trainer._save_optimizer_and_scheduler, step=4):
    if self.state.global_step == step:
        raise OSError(errno.ENOSPC, "No space left on device")
    stock(self, folder)


def _full_at_the_end(target, *, overwrite):
    if target.parent.name == "checkpoint-4":
        raise OSError(errno.ENOSPC, "No space left on device")
    return whole_file(target, overwrite=overwrite)


STOPS = {
    "not finite": (MixedTrainer, "compute_loss", _not_finite, "wanted finite weights, got others; the last"),
    "full disk": (Trainer, "_save_optimizer_and_scheduler", _full, "could not write .*No space left on device.*$"),
    "full disk at the end": (trainer_module, "whole_file", _full_at_the_end, "could not write .*No space left"),
}


@pytest.mark.parametrize(("cls", "name", "broken", "message"), STOPS.values(), ids=STOPS)
def test_what_stops_a_run_is_one_line_and_leaves_the_last_checkpoint(base, monkeypatch, cls, name, broken, message):
    monkeypatch.setattr(cls, name, broken)
    run = adaptation(base)
    refused(f"^training: stopped at step 4: {message}", run)
    assert [path.name for path in (run.work / "0-adapt").glob("checkpoint-*")] == ["checkpoint-2"]
    monkeypatch.undo()
    run_training(run, resume=True)
    assert len(logged(run.output)[1]) == 6


def test_what_stops_a_run_before_its_first_checkpoint_leaves_the_encoded_text(base, monkeypatch):
    monkeypatch.setattr(MixedTrainer, "compute_loss", partialmethod(_not_finite, step=0))
    run = adaptation(base)
    refused("^training: stopped at step 2: .*no checkpoint was written yet", run)
    assert any(file.is_file() for file in (run.work / "cache").rglob("*"))


def test_a_checkpoint_of_which_a_file_or_its_end_was_lost_is_refused(base):
    run = adaptation(base)
    with interrupted_at(3):
        run_training(run)
    checkpoint = newest_checkpoint(run.work / "0-adapt")
    for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", COMPLETE):
        file, content = checkpoint / name, (checkpoint / name).read_bytes()
        file.write_bytes(content[:-1])
        with pytest.raises(ValueError, match=f"as they were written, got {name} without its end, or none: delete"):
            newest_checkpoint(run.work / "0-adapt")
        file.write_bytes(content)
    (checkpoint / "optimizer.pt").unlink()
    refused("got optimizer.pt without its end, or none: delete that folder", run, resume=True)


def test_the_log_has_the_tenth_step_with_the_time_left_and_the_last(base, capsys):
    run = adaptation(base, steps=12, logging_steps=100, checkpoint_steps=100)
    run_training(run)
    _, (tenth, last) = logged(run.output)
    assert [tenth["step"], last["step"]] == [10, 12]
    assert "seconds_left" in tenth
    assert "adapt step 10/12" in capsys.readouterr().out


def test_tensorboard_gets_the_log_or_is_refused(base, monkeypatch):
    monkeypatch.setattr(run_module, "is_tensorboard_available", lambda: False)
    refused("report_to: wanted TensorBoard installed", adaptation(base, report_to="tensorboard"))

    class Board(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            folder = Path(args.output_dir) / "runs"
            folder.mkdir(exist_ok=True)
            with (folder / "events").open("a") as file:
                file.write(" ".join(logs))

    monkeypatch.setattr(run_module, "is_tensorboard_available", lambda: True)
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tensorboard", Board)
    run = adaptation(base, report_to="tensorboard", steps=1)
    run_training(run)
    assert "condensed_loss" in (run.output / "runs" / "adapt" / "events").read_text()
