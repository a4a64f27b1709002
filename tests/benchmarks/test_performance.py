"""The tables of docs/performance.md, from result files made up here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "pages"))

from performance_page import fill, filled

PAGE = """# Speed

Prose before.

<!-- bench: one step | 64, 128 | images/step.png
cuDNN, dense = kernel-h4-gpu decode cudnn
**CCA**, graph = kernel-h4-gpu decode cca / cudnn
-->
what stood here
<!-- /bench -->

Prose between.

<!-- bench: first token | 64
dense = model-m-gpu first dense
CCA = model-m-gpu first condensed cca / dense
CCA, cache = model-m-gpu cache condensed cca
-->
<!-- /bench -->
"""


def kernel_row(runner, length, ms, **more):
    return {"op": "decode", "runner": runner, "length": length, "times": {"median_ms": ms}, **more}


def document(date, rows):
    return {"provenance": {"date": date, "commit": "0123456789abcdef"}, "results": {"rows": rows}}


@pytest.fixture
def results():
    old = [kernel_row("cudnn", 64, 9.0), kernel_row("cudnn", 128, 4.0, share_of_copy=0.5), kernel_row("cca", 64, 9.0)]
    new = [kernel_row("cudnn", 64, 2.0), kernel_row("cca", 64, 0.05, speedup={"cudnn": 40.0, "flash": 7.0})]
    condensed = {"runner": "condensed cca", "length": 64, "first": {"median_ms": 1000.0}, "cache_bytes": 2**29}
    condensed["speedup"] = {"first": {"dense": 1.5}, "step": {}}
    dense = {"runner": "dense", "length": 64, "first": {"median_ms": 1500.0}}
    return {
        "bench-kernel-h4-gpu-20260201T000000Z": document("2026-02-01T00:00:00", new),
        "bench-kernel-h4-gpu-20260101T000000Z": document("2026-01-01T00:00:00", old),
        "bench-kernel-h4-gpu-b2-20260301T000000Z": document("2026-03-01T00:00:00", [kernel_row("cca", 64, 1.0)]),
        "bench-model-m-gpu-20260101T000000Z": document("2026-01-01T00:00:00", [dense, condensed]),
        "another-study": [],
    }


def test_each_cell_is_of_the_newest_file_that_holds_it(results):
    page, pictures = filled(PAGE, results)
    assert "what stood here" not in page
    assert "Prose before." in page
    assert "Prose between." in page
    assert "| one step | 64 | 128 |\n| --- | --- | --- |\n" in page
    assert "| cuDNN, dense | 2.00 ms | 4.00 ms, 50% |\n| **CCA**, graph | 50.0 us, 40.00x | - |\n" in page
    assert "| dense | 1.50 s |\n| CCA | 1.00 s, 1.50x |\n| CCA, cache | 0.500 GiB |\n" in page
    # the newer file first, by whose row the table begins
    assert "\nMeasured: 20260201T000000Z (commit 0123456789ab), 20260101T000000Z (commit 0123456789ab).\n" in page
    assert pictures == {
        "images/step.png": {"one step": {"cuDNN, dense": ([64.0, 128.0], [2.0, 4.0]), "CCA, graph": ([64.0], [0.05])}}
    }
    # filled again, it is the same page
    assert filled(page, results)[0] == page


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("64, 128", "64, many", "a block's head must be"),
        (" = kernel-h4-gpu decode cudnn", " kernel-h4-gpu decode", "a block's row must be"),
        ("decode cudnn", "decode flash", "no result file holds 'cuDNN, dense = kernel-h4-gpu decode flash'"),
        ("kernel-h4-gpu", "kernel-h5-gpu", "no result file holds"),
        ("<!-- bench", "<!-- bunch", "page must have a block"),
    ],
)
def test_a_page_that_asks_for_something_else_is_refused(results, old, new, message):
    with pytest.raises(ValueError, match=message):
        filled(PAGE.replace(old, new), results)


def test_a_page_is_written_and_its_pictures_are_drawn(results, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "page.md").write_text(PAGE)
    fill(tmp_path / "page.md", results)
    assert (tmp_path / "page.md").read_text() == filled(PAGE, results)[0]
    assert (tmp_path / "images" / "step.png").read_bytes().startswith(b"\x89PNG")
