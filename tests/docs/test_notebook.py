"""The notebook runs from top to bottom, on less text and with fewer steps than it says."""

import json
from pathlib import Path

import matplotlib

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "first_look.ipynb"
CHEAP = "CHARACTERS, STEPS, LENGTH = 5_000, 3, 256"


def test_it_runs_and_shows_what_it_says(capsys):
    matplotlib.use("Agg")
    document = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    assert "CHARACTERS, STEPS, LENGTH =" in sources[0]
    # a reader sees what it gives without running it
    assert all(
        cell["outputs"] for cell in document["cells"] if cell["cell_type"] == "code" and cell["execution_count"] > 1
    )
    names = {}
    for source in [CHEAP, *sources[1:]]:
        exec(compile(source, str(NOTEBOOK), "exec"), names)
    dense, learned, recall, window = names["outcomes"]
    assert dense.correct == recall.correct == len(names["keys"]) > 0
    assert window.correct < learned.correct
    assert learned.cache_bytes < dense.cache_bytes
    assert names["after"] < names["before"]
    assert "entries" in capsys.readouterr().out
