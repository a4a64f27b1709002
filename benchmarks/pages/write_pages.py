"""Write the pages whose tables come from `benchmarks/results`, or say which are not as the results fill them.

    python benchmarks/pages [--check]

The programs that measured the finished studies stood at the commit that `docs/studies/result-files.md` names.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import adaptation_page
import experiments_page
import files_page
import papers_page
import performance_page
import readme_page
import recall_page
import reread_page
import serving_page
import transfer_page
import zero_shot_page
from stored import ROOT, of, stored

_KERNEL = "bench-kernel-h32-kv8-d128-v128-b1-bfloat16-nvidia-h200"
_COSTS = ("bench-model-deepseek-v2-lite-bfloat16-nvidia-h200-20261121T120455Z",)
_LAYERS = (f"{_KERNEL}-20261121T151300Z", f"{_KERNEL}-20261121T163413Z")
# filled where they stand; the others are written from templates
FILLED = (
    *("README.md", "docs/performance.md", "docs/recall.md", "docs/serving.md"),
    *(f"docs/studies/{name}.md" for name in ("performance", "recall-settings", "reread", "serving")),
)
_STUDIES = ("adaptation", "experiments", "result-files", "results", "transfer", "zero-shot")
PAGES = (*FILLED, *(f"docs/studies/{name}.md" for name in _STUDIES))


def write(docs: Path) -> None:
    """Write all pages and their pictures into a folder like `docs`; there, and above it, are those that are filled."""
    everything, studies = stored(), docs / "studies"
    readme_page.fill(docs.parent / "README.md", everything)
    for page in (docs / "performance.md", studies / "performance.md"):
        performance_page.fill(page, everything)
    recall_page.fill(studies / "recall-settings.md", everything["zero-shot-h200-20261122T020720Z"])
    transfer_page.fill(docs / "recall.md", of("transfer.json"))
    reread_page.fill(studies / "reread.md", everything["reread"], of("transfer.json"))
    serving_page.fill([docs / "serving.md", studies / "serving.md"], everything, docs / "images" / "serving.png")
    costs, layers = ({name: everything[name] for name in names} for names in (_COSTS, _LAYERS))
    experiments_page.write_page(of("experiments.json"), costs, layers, studies / "experiments.md")
    runs = {name: document for name, document in of("adaptation.json").items() if isinstance(document, list)}
    billion, shapes = (of("adaptation.json", names) for names in ((adaptation_page.BILLION,), adaptation_page.SHAPES))
    adaptation_page.write_page(runs, billion, shapes, studies / "adaptation.md")
    transfer_page.write_page(of("transfer.json"), studies / "transfer.md")
    zero_shot_page.write_page(of("zero-shot.json"), studies / "zero-shot.md")
    (studies / "results.md").write_text(papers_page.page(everything), encoding="utf-8")
    (studies / "result-files.md").write_text(files_page.page(), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    if not parser.parse_args().check:
        write(ROOT / "docs")
        return
    different = differing()
    print("\n".join(different))
    sys.exit(bool(different))


def differing() -> list[str]:
    """The pages that are not as the results fill them."""
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder) / "docs"
        for name in ("studies", "images"):
            (docs / name).mkdir(parents=True)
        for page in FILLED:
            shutil.copy(ROOT / page, Path(folder) / page)
        write(docs)
        return [page for page in PAGES if not filecmp.cmp(Path(folder) / page, ROOT / page, shallow=False)]
