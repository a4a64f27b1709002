"""`condense run`: another program's own command line, with condense imported."""

import sys

import pytest
from models import tiny

import condense
from condense.cli.main import main

PROGRAM = """
import sys
from transformers import AutoModelForCausalLM

if sys.argv[1:] == ["fail"]:
    raise ValueError("the program's own")
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
sys.stdout.write(f"{sys.argv[1]} {type(model.model.layers[0].self_attn).__name__}\\n")
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "scorer.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["condense", "run", *arguments])
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code or 0, *capsys.readouterr()

    return run


def test_it_loads_a_saved_model_condensed(run, tmp_path):
    condense.apply(tiny.model("llama"), tiny.CCA).save_pretrained(tmp_path / "saved")
    assert run("-m", "scorer", "--help", str(tmp_path / "saved"))[:2] == (0, "--help CondensedLlamaAttention\n")


def test_its_failures_are_its_own(run):
    code, out, err = run("-m", "scorer", "fail")
    assert (code, out) == (1, "")
    assert "ValueError: the program's own" in err


@pytest.mark.parametrize("name", ["lm_evall", "lm_evall.main", ".scorer"])
def test_a_module_that_is_not_there(run, name):
    code, out, err = run("-m", name, "--tasks", "gsm8k")
    assert (code, out) == (2, "")
    assert err == f"condense: -m must name a module, as of python -m, got '{name}': there is none of this name here\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_module_it_says_what_to_give(run, arguments):
    code, out, _ = run(*arguments)
    assert code == 0
    assert "run -m MODULE [ARGUMENTS]..." in " ".join(out.split())
    assert "ValueError" not in out


@pytest.mark.parametrize("arguments", [["scorer", "--help"], ["-x"]])
def test_a_module_without_its_option_is_refused(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err == f"condense: run needs -m before the module, as in condense run -m lm_eval, got '{arguments[0]}'\n"
