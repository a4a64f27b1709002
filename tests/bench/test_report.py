"""Pages from result files made up here."""

from pathlib import Path

import pytest

from condense.bench import MODEL_SHAPES, newest, picture_name, render
from condense.bench.published import PUBLISHED, fastest

PROVENANCE = {"device": "x", "torch": "2", "transformers": "5", "condense": "0", "commit": None, "date": "today"}


def model_row(runner, length, first_ms, *, method=None, cache=2**30, error=None):
    row = {"runner": runner, "length": length, "condensed": method is not None}
    row["method"] = None if method is None else {"method": method}
    times = {"first": {"median_ms": first_ms}, "step": {"median_ms": first_ms / 100}, "cache_bytes": cache}
    return row | (times if error is None else {"error": error})


def model_page(**changes):
    results = {
        "kind": "model",
        "model": "deepseek-v2-lite",
        "layers": 27,
        "dtype": "bfloat16",
        "prefill_chunk": None,
        "methods": {"lca": {}},
        "parameters": 1,
        "weight_bytes": 1,
        "runners": {"dense": "stock"},
        "claims": True,
        "experts": "grouped_mm",
        "crossover": {"first": {}, "step": {}},
        "rows": [
            model_row("dense", 131072, 6480.0, cache=3.8 * 2**30),
            model_row("dense_graph", 131072, 6500.0),
            model_row("condensed cca", 131072, 1000.0, method="cca"),
            model_row("condensed lca", 131072, 2500.0, method="lca", cache=0.25 * 2**30),
            model_row("condensed_graph lca", 131072, 0.0, method="lca", error="no room"),
        ],
        "feed_forward": [{"length": 131072, "first_ms": 1620.0, "step_ms": 5.0}],
    }
    return render({Path("a.json"): {"provenance": PROVENANCE, "results": results | changes}})


def test_the_papers_figures_stand_beside_ours():
    page = model_page()
    _, _, section = page.partition("beside the LCA paper's figures")
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    # a length that was not measured here is left out
    assert lines[1:] == [
        "| 131,072 tokens, lca (Table 3, Section 5.3): first token | 6.48 s dense | 10.78 s | "
        "2.50 s **condensed lca** | 4.40 s |",
        "| 131,072 tokens, lca (Table 3, Section 5.3): cache | 3.800 GiB | 10.13 GiB | 0.250 GiB | 0.71 GiB |",
    ]
    assert "NVIDIA H200" in section
    assert "baseline is not named" in section


def test_a_model_condensed_in_some_layers_is_neither_dense_nor_the_papers():
    dense = model_row("dense", 131072, 6480.0)
    some = model_row("condensed lca in layers 1", 131072, 5.0, method="lca") | {"method": {"1": {"method": "lca"}}}
    assert fastest([some, dense], 131072, None) == dense
    assert fastest([some, dense], 131072, "lca") is None


@pytest.mark.parametrize("changes", [{"model": "llama-3.1-8b"}, {"layers": 2}, {"model": "my-model"}])
def test_other_models_are_not_the_papers(changes):
    assert "paper" not in model_page(**changes)


def test_published_caches_are_what_layers_tokens_and_widths_make():
    # numbers per token and layer; condensed: one of 16 outside a window of 1024 tokens
    numbers = {"deepseek-v2-lite": 512 + 16 * 64, "minicpm3-4b": 256 + 32, "qwen2.5-7b": 4 * 2 * 128}
    assert numbers.keys() == PUBLISHED.keys()
    for name, figures in PUBLISHED.items():
        for figure in figures:
            if figure.cache_gib is not None:
                per_token = 2 * numbers[name] * MODEL_SHAPES[name]["num_hidden_layers"] / 2**30
                kept = (figure.length, (figure.length - 1024) / 16 + 1024)
                # printed with two decimals
                assert figure.cache_gib == pytest.approx([per_token * tokens for tokens in kept], abs=0.0051)


def test_feed_forward_is_a_part_of_every_runner():
    page = model_page()
    assert "experts by `grouped_mm`" in page
    _, _, section = page.partition("### feed-forward modules")
    assert "| alone | 1.62 s, 5 ms |" in section
    assert "| dense | 25%, 8% |" in section
    assert "| **condensed lca** | 65%, 20% |" in section
    assert "out of luck" in model_page(feed_forward=[{"length": 131072, "error": "out of luck"}])
    # as in result files from before there was such a figure
    assert "### feed-forward modules" not in model_page(feed_forward=[])


def test_a_page_has_the_newest_file_of_each_title():
    def document(date, **changes):
        results = {"kind": "model", "model": "m", "layers": 2, "dtype": "float32", "prefill_chunk": None}
        return {"provenance": {"date": date}, "results": results | {"methods": {"cca": {}}} | changes}

    documents = {
        Path("b.json"): document("2026-11-21T10:00:00+00:00"),
        Path("a.json"): document("2026-11-20T10:00:00+00:00"),
        Path("c.json"): document("2026-11-19T10:00:00+00:00", methods={"cca": {}, "lca": {}}),
    }
    assert [path.name for path in newest(documents)] == ["b.json", "c.json"]


@pytest.mark.parametrize(
    ("methods", "name"),
    [
        (["lca"], "model-m-bfloat16-gpu-lca.png"),
        (["lca", "dga"], "model-m-bfloat16-gpu-lca-dga.png"),
        (["lca", "lca:window=128", "dga"], "model-m-bfloat16-gpu-lca-dga-3-settings.png"),
        (["CCA(group_size=4) in layers 1"], "model-m-bfloat16-gpu-CCA-group_size-4-in-layers-1.png"),
    ],
)
def test_pictures_are_named_by_what_they_show(methods, name):
    results = {"methods": {label: {} for label in methods}}
    assert picture_name(Path("bench-model-m-bfloat16-gpu-20261121T163236Z.json"), results) == name


def test_a_kernels_notes():
    row = {
        "op": "layer",
        "runner": "dga",
        "condensed": True,
        "length": 1000,
        "times": {"median_ms": 2.0},
        "tflops": 3.0,
        "share_of_matmul": 0.5,
        "pairs": 500_000,
        "per_key": {"cca": 1.25},
    }
    results = {
        "kind": "kernel",
        "shape": {"num_q": 1, "num_kv": 1, "width": 1, "value_width": 1},
        "batch": 1,
        "dtype": "bfloat16",
        "ceilings": {"matmul_tflops": 1.0, "copy_tbs": 1.0},
        "claims": True,
        "methods": {"dga": {}},
        "note": "The machine had other work.",
        "crossover": {},
        "rows": [
            row,
            {**row, "op": "importance", "pairs": None, "per_key": {}, "of_attention": 0.123},
        ],
    }
    page = render({Path("a.json"): {"provenance": PROVENANCE, "results": results}})
    assert "2 ms<br>3 TFLOP/s, 50%<br>500 keys per query<br>1.25 times cca's attention, per key" in page
    assert "2 ms<br>3 TFLOP/s, 50%<br>12.3% of its attention" in page
    assert "batch 1, bfloat16: dga\n" in page
    assert "\nThe machine had other work.\n" in page
