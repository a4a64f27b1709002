"""Settings of the methods: defaults, checks that name the field, the round trip through JSON, and named settings."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from models import tiny
from oracles import cases
from small_models import random_llama

import condense
from condense import CCA, DGA, LCA, Dense, LMInfinite, Method, Recall, Reread, StreamingLLM
from condense.baselines import FlexPrefill, SnapKV, VerticalSlash
from condense.config import method_from_dict
from condense.named import NAMED_SETTINGS
from condense.plots import method_labels

METHODS = cases.PLANS | cases.PROMPTS | cases.SELECTIONS | cases.GRID | cases.RECALLS
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
REFUSED = {
    r", got 'CCCA'; close: cca$": {"method": "CCCA"},
    r"'pooled'\], got 'recall-hosts'; close: recall-host": {"method": "recall-hosts"},
    r"recall: unknown settings \['gamma'\]": {"method": "recall-host", "gamma": 3},
    r"method must be one of \[.*'cca'.*'lca'.*\], got 'nothing'; a class of your own": {"method": "nothing"},
    r"cca: unknown settings \['groups'\]; known are \['group_size', ": {"method": "cca", "groups": 3},
    r"dga: unknown settings \['entry_bits'\]": {"method": "dga", "entry_bits": 4},
    "rep_bias='matched' .*'streaming', got 'prompt'": {"method": "dga", "rep_bias": "matched", "selection": "prompt"},
    "method must be one of": {},
    "must be a dict, got 'cca'": "cca",
}  # fmt: skip
DEFAULTS = [
    (CCA(), {"group_size": 16, "window": 1024, "summary": "last", "key_pooling": "weighted", "rep_bias": "none"}),
    (LCA(), {"group_size": 16, "window": 1024, "summary": "streaming", "key_pooling": "select"}),
    (LCA(), {"value_pooling": "weighted", "num_summary_queries": None, "allow_future": False}),
    (DGA(), {"group_size": 16, "window": 1, "gamma": 0.1, "min_focal": 1024, "selection": "streaming"}),
    (DGA(), {"summary": "last", "focal": "top", "complementary": True, "num_recent": 64, "num_random": 64}),
    (DGA(), {"seed": 0, "rep_bias": "none", "allow_future": False}),
    (StreamingLLM(), {"sink": 4, "window": 2000}),
    (LMInfinite(), {"n_global": 10, "window": 4096}),
    (Dense(), {}),
]


def test_all_groups_that_json_has_made_one_are_refused():
    model = condense.apply(random_llama(), Recall(num_recall=2))
    shares = [each["method"]["num_recall"] for each in model.config.condense["methods"]]
    assert [str(share) for share in shares] == ["1.0", "2"]
    said = r"num_recall must be an integer >= 2, or a share .* 1.0 \(all\), got 1$"
    for written in ({"method": "recall", "num_recall": 1}, "recall:num_recall=1"):
        tiny.refused(said, Method.parse, written)


@pytest.mark.parametrize(("method", "settings"), DEFAULTS, ids=lambda x: type(x).__name__)
def test_defaults_are_the_papers(method, settings):
    assert settings.items() <= method.to_dict().items()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_to_dict_and_back(method):
    settings = json.loads(json.dumps(method.to_dict()))
    again = method_from_dict(settings)
    assert (again, type(again), hash(again)) == (method, type(method), hash(method))
    assert Method.parse(settings) == Method.parse(method) == method


BAD = [
    (CCA, "group_size", (0, -1, 1.5, "16", None, True, np.int64(4))), (CCA, "window", (-1, 2.0, "x", None, False)),
    (CCA, "summary", ("Last", "", None, 3, True)), (CCA, "num_summary_queries", (0, -2, 1.5, True, "4")),
    (CCA, "key_pooling", ("avg", None, 1)), (CCA, "value_pooling", ("", "SELECT")),
    (CCA, "rep_bias", ("log", None, 2.77, True)), (CCA, "entry_bits", (0, 2, 12, "4", 8.0, True, None)),
    (CCA, "allow_future", (None, 0, 1, "yes")), (DGA, "group_size", (0, 1.0, True)), (DGA, "window", (-1, "x")),
    (DGA, "gamma", (-0.1, 1.01, math.nan, math.inf, "0.1", None, True)), (DGA, "min_focal", (-1, 2.5, None, False)),
    (DGA, "selection", ("causal", None, 1)), (DGA, "summary", ("prompt", None)), (DGA, "focal", ("best", None, False)),
    (DGA, "complementary", (None, 1, "no")), (DGA, "num_recent", (0, 1.5)), (DGA, "num_random", (-1, None)),
    (DGA, "seed", (-1, 0.5, None)), (DGA, "rep_bias", ("log", None)), (DGA, "allow_future", (None, 1)),
    (StreamingLLM, "sink", (-1, 0.5, True, None)), (StreamingLLM, "window", (0, -1, "all", True)),
    (Recall, "num_recall", (0, -1, True, 2.5, "2")), (Recall, "unchosen", ("keep",)),
    (Reread, "share", (1.5, -0.1)), (Reread, "piece", (0,)),
    (Reread, "sink", (-1,)), (Reread, "window", (-1,)), (LMInfinite, "n_global", (-1, 0.5, True, None)),
    (LMInfinite, "window", (0, -1, None, True)), (SnapKV, "budget", (32,)), (SnapKV, "kernel_size", (4,)),
    (FlexPrefill, "gamma", (1.5,)), (VerticalSlash, "vertical", (-1,)),
]  # fmt: skip
VALUES = [(cls, field, value) for cls, field, values in BAD for value in values]


@pytest.mark.parametrize(("cls", "field", "value"), VALUES, ids=lambda x: getattr(x, "__name__", repr(x)))
def test_a_bad_setting_is_named(cls, field, value):
    for call in (cls, cls().replace, lambda **given: method_from_dict({"method": cls.name} | given)):
        tiny.refused(rf"^{field} must be .*got {re.escape(repr(value))}", call, **{field: value})


@pytest.mark.parametrize(("message", "settings"), REFUSED.items(), ids=str)
def test_what_is_no_settings_says_what_there_is(message, settings):
    tiny.refused(message, method_from_dict, settings)


def test_settings_are_frozen_and_named_and_names_of_the_library_are_taken():
    taken = "name must differ from those of the library's methods, got 'cca'"
    tiny.refused(taken, type, "Mine", (StreamingLLM,), {"name": "cca"})
    assert type(Method.parse("cca")) is CCA
    tiny.refused("method must be one for all layers here, got 'cca@0': leave out @", Method.parse, "cca@0")
    with pytest.raises(dataclasses.FrozenInstanceError):
        CCA().window = 3
    with pytest.raises(TypeError):
        CCA(16)
    assert [str(CCA(window=256)), str(LCA())] == ["CCA(window=256)", "LCA()"]
    with pytest.raises(TypeError, match="Method must define `layout`"):
        _ = Method().layout


@pytest.mark.parametrize("name", NAMED_SETTINGS)
def test_a_name_is_a_method_with_all_settings(name):
    method = Method.parse(name)
    assert NAMED_SETTINGS[name].settings.items() <= method.to_dict().items()
    assert Method.parse({"method": name}) == method
    for text in (f"{name}:window=96", {"method": name, "window": 96}):
        assert Method.parse(text) == method.replace(window=96)
    assert README.count(f"\n- **`{name}`**, for a model ") == 1


def test_a_method_is_labelled_by_the_name_of_its_settings():
    choices = [condense.Method.parse(text) for text in ("recall-host", "recall-host:window=8", "cca", "cca:window=8")]
    mixed = {0: choices[0], 1: choices[2]}
    assert method_labels([*choices, mixed]) == ["recall-host", "Recall", "CCA 1", "CCA 2", "recall-host+CCA"]
