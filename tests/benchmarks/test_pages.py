"""The pages whose tables come from result files: they are as the files fill them, and what no file holds is refused."""

import math
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "pages"))

import papers_page
import readings
import readme_page
import recall_page
import serving_page
import stored
import transfer_page
import write_pages
import zero_shot_page
import zero_shot_tables
from needed import BOUND, needed, predicted

from condense.named import NAMED_SETTINGS

INVENTORY = [f"{paper}{n}" for paper, count in (("C", 12), ("D", 15), ("L", 17)) for n in range(1, count + 1)]


def test_pages_are_as_the_results_fill_them():
    assert write_pages.differing() == []


def test_result_files_are_few_and_compact():
    files = [*stored.RESULTS.iterdir()]
    assert len(files) <= 60
    assert sum(file.stat().st_size for file in files) <= 3e6
    for file in files:
        assert '": ' not in file.read_text(encoding="utf-8")[:200], f"{file}: write it without spaces"


def test_every_table_and_figure_of_the_papers_has_a_row():
    template = Path(papers_page.__file__).with_name("papers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([CDL]\d+) \|(.*)\|$", template, re.MULTILINE)
    assert [name for name, _ in rows] == INVENTORY
    for name, row in rows:
        cells = [cell.strip() for cell in row.split(" | ")]
        assert len(cells) == 4, name
        assert all(cells[:3]), name


def test_a_number_that_no_file_holds_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no result file"):
        papers_page.Figures({}).figure("model llama-3.1-8b first 4096 dense")
    page = tmp_path / "page.md"
    page.write_text("<!-- zero-shot llama 4096 -->\n| |\n|---|\n| recall r=5 | |\n<!-- /zero-shot -->\n")
    with pytest.raises(ValueError, match="no run of llama 4096 recall r=5"):
        recall_page.fill(page, stored.stored()["zero-shot-h200-20261122T020720Z"])
    page.write_text("<!-- paged -->\n<!-- /paged -->\n")
    with pytest.raises(ValueError, match="must name its results"):
        serving_page.fill(page, stored.stored())
    with pytest.raises(ValueError, match="results: no runs of"):
        zero_shot_page.write_page({"none": {"results": {"runs": []}}}, tmp_path / "page.md")


def test_a_table_of_serving_says_what_rounds_do_not_share():
    def run(*steps):
        rows = zip((1, 2), steps, strict=False)
        return {"decode-4097": [[{"rows": n, "step_ms": {"median": ms}, "preempted": 0} for n, ms in rows]]}

    table = serving_page._decode_table({"dense": [run(4.0)], "condensed": [run(2.0, 2.5), run(2.0, 2.7)]}, 4097)
    assert table.splitlines()[2:] == [
        "| 1 | 4.00, 250 | 2.00, 500 | 2.00x |",
        "| 2 | do not fit | 2.60 (2.50 to 2.70), 769 | 3.1x of its best |",
    ]


def test_groups_that_must_be_open_follow_a_power_of_the_length():
    def points(r):  # where the loss comes down to the bound, on a line over logarithms
        return [(n, BOUND - 0.02 * math.log(n / r)) for n in (2, 8, 32, 128, 512)]

    groups = [(length, needed(points(0.25 * length**0.5))) for length in (2048, 8192, 32768)]
    assert [r for _, r in groups] == pytest.approx([0.25 * length**0.5 for length, _ in groups])
    assert predicted([*groups, (1024, None)]) == pytest.approx(0.25 * 131072**0.5)
    assert needed([(2, 0.005), (8, 0.001)]) is None
    assert predicted(groups[:1]) is None


def test_at_equal_bytes_each_kind_shows_its_best_row():
    row = readings.Row(0.08, 0.0, 0.5, 0.1, 0.1, 0.2)
    small = row._replace(share=0.0505, found=0.495, last=0.1)
    rows = {"dense": [row._replace(share=1.0, found=1.0)], "cca g=16": [row], "window 5%": [small], "cca g=32": [small]}
    table = zero_shot_tables.equal(rows)
    # a row may be a little larger; within one number in a hundred the loss decides
    assert "| window (StreamingLLM) | 0.495, +0.100 | 0.495, +0.100 | 0.495, +0.100 | 0.495, +0.100 |" in table
    assert "| pooled: CCA | 0.495, +0.100 | 0.495, +0.100 |" in table
    assert "SnapKV" not in table
    rows["cca g=32"] = [small._replace(found=0.2)]
    assert "| pooled: CCA | 0.200, +0.100 | 0.500, +0.200 |" in zero_shot_tables.equal(rows)


def test_what_queries_open_together():
    models = {"llama-77m": {"united": [{"length": 16384, "group": 32, "8": [0.4, 0.51], "64": [0.7, 1.0]}]}}
    assert transfer_page._united(models).splitlines() == [
        "| queries | 8 | 64 |",
        "| --- | --- | --- |",
        "| 77M Llama, 16,384 tokens, groups of 32 | 40% (51%) | 70% (100%) |",
    ]


def test_what_named_settings_lose_is_the_worst_that_was_measured():
    models = transfer_page.newest(stored.of("transfer.json")).values()
    arms = {"recall-device": "drop 1/4, groups of 32, store 4", "recall-host": "drop 256, store 4"}
    losses = {name: readme_page.lost(models, arm) for name, arm in (arms | {"cache": "cache of 4 bits"}).items()}
    for name in arms:
        far, copies, task = losses[name]
        assert f"{far} nats on tokens that need far text and {task} of a task" in NAMED_SETTINGS[name].loses
        assert f"{copies} on copies" in NAMED_SETTINGS[name].loses
    start = " ".join((write_pages.ROOT / "docs" / "start-here.md").read_text(encoding="utf-8").split())
    device, host, cache = (losses[name][0] for name in ("recall-device", "recall-host", "cache"))
    assert (
        f"lost at most {cache} nats a token where far text is needed, `recall-device` {device} and `recall-host` {host}"
        in start
    )


def test_the_worst_cell_is_that_of_any_length():
    rows = [{"arm": "x", "length": n, "number": [lost]} for n, lost in ((4096, 0.03), (16384, 0.05), (32768, -0.01))]
    assert transfer_page.worst({"rows": rows}, "x", transfer_page.TASKS) == (0.05, 16384)
