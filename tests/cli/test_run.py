"""`condense run`: another program's own command line, with condense imported."""

import sys

import pytest
from cli.test_commands import ran, refused, run_here
from models import tiny

import condense

PROGRAM = """
import sys
from transformers import AutoModelForCausalLM

if sys.argv[1:] == ["fail"]:
    raise ValueError("the program's own")
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
sys.stdout.write(f"{sys.argv[1]} {type(model.model.layers[0].self_attn).__name__}\\n")
"""
NO_MODULE = "-m must name a module, as of python -m, got '{}': there is none of this name here"
NO_OPTION = "run needs -m before the module, as in condense run -m lm_eval, got '{}'"
REFUSED = [("-m", name, "--tasks", "gsm8k") for name in ("lm_evall", "lm_evall.main", ".scorer")]
REFUSED += [("scorer", "--help"), ("-x",)]


@pytest.fixture(autouse=True)
def scorer(tmp_path, monkeypatch):
    (tmp_path / "scorer.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_it_loads_a_saved_model_condensed(tmp_path):
    condense.apply(tiny.model("llama"), tiny.CCA).save_pretrained(tmp_path / "saved")
    done = ran("run", "-m", "scorer", "--help", str(tmp_path / "saved"))
    assert done.stdout == "--help CondensedLlamaAttention\n"


def test_its_failures_are_its_own():
    done = run_here("run", "-m", "scorer", "fail")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ValueError: the program's own" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_module_it_says_what_to_give(arguments):
    done = ran("run", *arguments)
    assert "run -m MODULE [ARGUMENTS]..." in " ".join(done.stdout.split())
    assert "ValueError" not in done.stdout


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_is_no_module_is_refused(arguments):
    message = NO_MODULE.format(arguments[1]) if arguments[0] == "-m" else NO_OPTION.format(arguments[0])
    refused(f"condense: {message}\n", "run", *arguments)
