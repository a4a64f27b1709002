"""The pages whose tables come from result files: they are as the files fill them, and what no file holds is refused."""

import re
from pathlib import Path

import contenders
import matplotlib.figure
import papers_page
import performance_page
import pytest
import readme_page
import recall_page
import serving_page
import stored
import transfer_page
import write_pages
import zero_shot_page
from models import tiny

import condense
from condense.named import NAMED_SETTINGS

INVENTORY = [f"{paper}{n}" for paper, count in (("C", 12), ("D", 15), ("L", 17)) for n in range(1, count + 1)]
REFUSED = [
    (" | 131072\n", " | many\n", "a block's head must be"),
    (" first dense\n", " first\n", "a block's row must be"),
    (" first dense\n", " first sparse\n", "no result file holds"),
    ("<!-- bench", "<!-- bunch", "page must have a block"),
]


def test_pages_are_as_the_results_fill_them_which_are_few_and_compact(monkeypatch):
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda *args, **options: None)  # which takes long
    assert write_pages.differing() == []
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
    tiny.refused("no result file", papers_page.Figures({}).figure, "model llama-3.1-8b first 4096 dense")
    page = tmp_path / "page.md"
    page.write_text("<!-- zero-shot llama 4096 -->\n| |\n|---|\n| recall r=5 | |\n<!-- /zero-shot -->\n")
    run = stored.stored()["zero-shot-h200-20261122T020720Z"]
    tiny.refused("no run of llama 4096 recall r=5", recall_page.fill, page, run)
    page.write_text("<!-- paged -->\n<!-- /paged -->\n")
    tiny.refused("must name its results", serving_page.fill, [page], stored.stored())
    tiny.refused("results: no runs of", zero_shot_page.write_page, {"none": {"results": {"runs": []}}}, page)


@pytest.mark.parametrize(("old", "new", "message"), REFUSED)
def test_a_page_of_speed_that_asks_for_something_else_is_refused(old, new, message):
    page = (write_pages.ROOT / "docs" / "studies" / "performance.md").read_text(encoding="utf-8")
    tiny.refused(message, performance_page.filled, page.replace(old, new), stored.stored())


def test_what_named_settings_lose_is_the_worst_that_was_measured():
    documents = stored.of("transfer.json")
    losses = {name: readme_page.lost(documents, name) for name in ("recall-device", "recall-host", None)}
    for name, (text, copies, task) in losses.items():
        said = NAMED_SETTINGS[name].loses if name else ""
        assert all(x in said for x in (f"{text} nats on text", f"{copies} on copies", f"{task} of a task")) or not name
    trained = transfer_page.trainings_of(documents)
    others = {key: model for key, model in trained.items() if model["make"] != "mla-28m"}
    for name in ("recall-device", "recall-host"):
        assert f"others {transfer_page.worst(others, name, ['copy'])[0]:.3f}" in NAMED_SETTINGS[name].loses
    # the arms are those of the settings, the store's place aside
    arms, _ = contenders.arms_of("transfer", 16384)
    device, host = (condense.Method.parse(name) for name in ("recall-device", "recall-host"))
    assert arms["recall-device"] == device
    assert arms["recall-host"] == host.replace(store="device")
    assert host == device.replace(store="host", num_recall=512, slots=512)
    start = " ".join((write_pages.ROOT / "docs" / "start-here.md").read_text(encoding="utf-8").split())
    device, host, cache = (losses[name][0] for name in ("recall-device", "recall-host", None))
    assert f"lost at most {cache} nats a token of text, `recall-device` {device} and `recall-host` {host}" in start
