"""`docs/studies/results.md`: the papers' tables, ``papers.md`` with every ``[[figure]]`` taken from the results."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import kda_figures
from small_runs import figures_of, of_seeds, spread
from speed.rows import milliseconds
from stored import Documents, described

PREFILL = {
    "bundled": "Bundled model, its 8 layers' attention on a book",
    "llama-3.1-8b": "One layer of Llama-3.1-8B's shape (32 query and 8 KV heads of 128), random inputs",
    "deepseek-v2-lite": "One layer of DeepSeek-V2-Lite's shape, over the keys that its latents expand to (16 heads of "
    "192, values of 128), random inputs",
}
FIGURE = re.compile(r"\[\[(\w[^\]]*)\]\]")


class Figures:
    """Numbers by name, each from the newest document that holds it; ``used`` collects their names."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        self.used: dict[str, None] = {}

    def figure(self, text: str) -> str:
        """The figure that a placeholder stands for. Raises ValueError for one that no file holds."""
        kind, _, rest = text.partition(" ")
        found = getattr(self, kind)(*self.split(kind, rest))
        if not found:
            raise ValueError(f"no result file holds [[{text}]]")
        return str(found)

    @staticmethod
    def split(kind: str, rest: str) -> list[str]:
        if kind in ("model", "ratio", "kernel", "hours"):
            return rest.split(" ", 3)
        return rest.split(" ", 2) if kind == "run" else rest.split()

    def model(self, shape: str, figure: str, length: str, runner: str) -> str:
        """A time or a size of a whole model, with its ratio to dense where the same run has one."""
        row = self.row(f"bench-model-{shape}-bfloat16-*", runner, int(length), None)
        if figure == "cache":
            return f"{row['cache_bytes'] / 2**30:#.3g} GiB"
        ratio = ((row.get("speedup") or {}).get(figure) or {}).get("dense")
        return milliseconds(row[figure]["median_ms"]) + (f" ({ratio:.1f}x)" if ratio else "")

    def ratio(self, shape: str, figure: str, length: str, runner: str) -> str:
        """Speedup over dense attention in the same run."""
        row = self.row(f"bench-model-{shape}-bfloat16-*", runner, int(length), figure)
        return f"{row['speedup'][figure]['dense']:.1f}x"

    def hours(self, prompts: str, shape: str, length: str, runner: str) -> str:
        """Hours until the first tokens after so many prompts, one after the other."""
        ms = self.row(f"bench-model-{shape}-bfloat16-*", runner, int(length), None)["first"]["median_ms"]
        return f"{int(prompts):,} x {milliseconds(ms)} = {int(prompts) * ms / 3.6e6:.1f} h"

    def adapting(self, sequences: str = "") -> str:
        """Tokens a second of Llama-3.1-8B's shape on four GPUs, or hours of 1,000 steps of 32,768-token sequences."""
        rows = self.read("adaptation-shape-fsdp2-llama-3.1-8b-4-nvidia-h200-20261122T124300Z")["rows"]
        speed = min(next(row for row in rows if row["name"] == "condensed")["tokens_per_second"][1:])
        return f"{1000 * int(sequences) * 32768 / speed / 3600:.1f} h" if sequences else f"{speed:,}"

    def kernel(self, shape: str, op: str, length: str, runner: str) -> str:
        """A time of one layer, with its ratio to cuDNN."""
        row = self.row(f"bench-kernel-{shape}-b1-bfloat16-*", runner, int(length), None, op)
        ratio = (row.get("speedup") or {}).get("cudnn")
        return milliseconds(row["times"]["median_ms"]) + (f" ({ratio:.1f}x)" if ratio else "")

    def row(self, pattern: str, runner: str, length: int, ratio: str | None, op: str | None = None) -> Any:
        """The row of the newest file; of those with a ratio to dense, if there are any or ``ratio`` wants one."""
        found = []
        stem = re.compile(re.escape(pattern[:-1]) + r"[a-z]+-[a-z0-9]+-\d{8}T\d{6}Z")
        for name, document in sorted(self.documents.items()):
            if not stem.fullmatch(name):
                continue
            for row in document["results"]["rows"]:
                same = row["runner"] == runner and row["length"] == length and row.get("op") == op
                if same and not row.get("error") and (row.get("times") or row.get("step")):
                    speedup = row.get("speedup") or {}
                    has = bool(speedup.get(ratio or "first" if op is None else "cudnn"))
                    found.append((has, document["provenance"]["date"], name, row))
        if not found or (ratio and not max(x[0] for x in found)):
            raise ValueError(f"no result file holds {pattern} {runner} {length} {op or ''}")
        _, _, name, row = max(found, key=lambda x: x[:2])
        self.used[name] = None
        return row

    @cached_property
    def runs(self) -> dict[str, Any]:
        found = {}
        for name in self.named("experiments-h200-*"):
            found |= {entry["run"]["name"]: entry for entry in self.read(name).get("runs", [])}
        return found

    def read(self, name: str) -> Any:
        self.used[name] = None
        document = self.documents[name]
        return document if isinstance(document, list) else document["results"]

    def named(self, pattern: str) -> list[str]:
        return sorted(name for name in self.documents if fnmatch(name, pattern))

    def run(self, prefix: str, what: str, method: str) -> str:
        """A figure of small models that were trained here."""
        return str(getattr(figures_of(self.runs, prefix, method), what))

    def scratch(self, shape: str, attention: str) -> str:
        """Validation loss after 1,000 steps from random weights."""
        curves = [run["curve"] for run in of_seeds(self.runs, f"{shape}-scratch-{attention}")]
        return spread([point["loss"] for curve in curves for point in curve if point["step"] == 1000], 3)

    def noise(self, prefix: str) -> str:
        """KL at three variances of noise."""
        effects = [{x["variance"]: x["kl"] for x in run["noise"]} for run in of_seeds(self.runs, prefix)]
        return ", ".join(f"{fmean(e[v] for e in effects):.3f}" for v in (0.01, 0.1, 1.0))

    def demo(self, method: str) -> str:
        """Numbers that the bundled model finds, in words that it was not trained on."""
        entries = self.read("demo-model-seed0")["retrieval"]["cloze, held-out words"]
        return next(f"{x['exact']['share']:.3f}" for x in entries if x["name"] == method)

    def adapted(self, arm: str, what: str) -> str:
        """Numbers found, or the text loss, after an adaptation, seed by seed."""
        name = next(name for name, arms in self.adaptations.items() if arm in arms)
        runs = {x["results"]["seed"]: x["results"] for x in self.read(name) if x["results"].get("arm") == arm}
        entries = [runs[seed]["retrieval" if what == "found" else "text"][0] for seed in sorted(runs)]
        return ", ".join(f"{x['exact']['share'] if what == 'found' else x['loss']:.3f}" for x in entries)

    @cached_property
    def adaptations(self) -> dict[str, set[str]]:
        """The study of adaptations, the newest first, and the arms in each document."""
        names = reversed(self.named("adaptation-8192-h200-*"))
        return {name: {run["results"].get("arm") for run in self.documents[name]} for name in names}

    def sparse(self, rho: str, last: str = "") -> str:
        """P_sparse by length."""
        layers = self.read("analysis-sparsity-cpu")["layers"]
        lengths = list(layers[0]["sparse"][rho])
        means = [fmean(x["sparse"][rho][n] for x in layers) for n in lengths]
        return f"{means[-1]:.2f}" if last else ", ".join(f"{x:.2f}" for x in means)

    def top(self, count: str) -> str:
        layers = self.read("analysis-sparsity-cpu")["layers"]
        return f"{fmean(x['top'][count] for x in layers):.2f}"

    def histogram(self, below: str) -> str:
        content = self.read("analysis-sparsity-cpu")
        edges, layers = content["edges"], content["layers"]
        places = [i for i, edge in enumerate(edges[1:]) if edge <= float(below)]
        return f"{sum(x['histogram'][i] for x in layers for i in places) / len(layers):.2f}"

    def keys(self, method: str) -> str:
        costs = self.read("analysis-cost-cpu")["costs"]
        return next(f"{x['keys']:,}" for x in costs if x["method"]["method"] == method and x["length"] == 131072)

    def condition(self, form: str) -> str:
        return f"{self.read('analysis-conditioning-cpu')['layers']['counter-example'][form]:.3g}"

    def layer4(self, form: str) -> str:
        return f"{self.read('analysis-conditioning-cpu')['layers']['4'][form]:.3g}"

    def deviation(self, texts: str, part: str) -> str:
        """Distances of keys or values from their entries, in parts of their norms: by length of a text, or by task."""
        name = {"lengths": "analysis-deviation-cpu", "tasks": "analysis-deviation-tasks-cpu"}[texts]
        return ", ".join(f"{100 * x[part]['relative']:.1f}" for x in self.read(name)["deviations"]) + " %"

    def retrieval(self, method: str) -> str:
        """The number of questions that a method was asked."""
        return str(self.found()[method]["total"])

    def found(self) -> dict[str, Any]:
        """Numbers hidden in 4,096 tokens that each method finds."""
        return {"cudnn" if x["name"] == "dense" else x["name"]: x["exact"] for x in self.asked["results"]}

    @property
    def asked(self) -> dict[str, Any]:
        """The newest retrieval by sparse prefill."""
        return self.newest("sparse-prefill-retrieval-*")

    def newest(self, pattern: str) -> Any:
        """The content of the last document of that name, by the date in it."""
        return self.read(self.named(pattern)[-1])

    @cached_property
    def sparse_prefill(self) -> dict[str, Any]:
        return self.newest("sparse-prefill-h200-*")

    def prefill(self, what: str, method: str = "") -> str:
        """Sparse prefill: all tables of the newest file, or of the bundled model at 128K tokens a ratio or a share."""
        if what != "tables":
            rows = self.sparse_prefill["bundled"]
            row = next(row for row in rows if row["method"] == method and row["length"] == 131072)
            return f"{row['speedup']:.1f} times" if what == "ratio" else f"{row['share']:.2f}"
        tables = [
            f"{PREFILL[shape]}:\n\n{self.prefill_table(shape)}" for shape in PREFILL if shape in self.sparse_prefill
        ]
        note = self.sparse_prefill.get("note")
        return "\n\n".join([*tables, *([note] if note else [])])

    def prefill_table(self, shape: str) -> str:
        """A line per method: what it finds, times and shares kept by length."""
        with_share, found = shape == "bundled", self.found()
        rows = {(row["method"], row["length"]): row for row in self.sparse_prefill[shape]}
        lengths = list(dict.fromkeys(length for _, length in rows))
        names = dict.fromkeys([*(name for name, _ in rows), *(found if with_share else ())])
        read = self.asked["computed"] if with_share else {}
        head = ["method", *(["found", "computed"] if with_share else [])]
        for length in lengths:
            head += [f"{length:,} tokens: time", "index", "computed", *(["kept"] if with_share else [])]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for name in names:
            cells = ["dense, cuDNN" if name == "cudnn" else name]
            if with_share:
                cells.append("{share:.3f} [{low:.3f}, {high:.3f}]".format(**found[name]) if name in found else "")
                cells.append(f"{read[name]:.3f}" if name in read else "")
            for length in lengths:
                row = rows.get((name, length), {})
                ratio = f" ({row['speedup']:.2f}x)" if "speedup" in row else ""
                cells.append(milliseconds(row["ms"]) + ratio if "ms" in row else "failed" if "error" in row else "")
                cells.append(milliseconds(row["index_ms"]) if "index_ms" in row else "")
                cells.append(f"{row['computed']:.3f}" if "computed" in row else "")
                cells += [f"{row['share']:.3f}" if "share" in row else ""] if with_share else []
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def kda(self, what: str) -> str:
        """A figure or a table of `kda_figures`."""
        return str(getattr(kda_figures, what)(self))

    def files(self) -> str:
        lines = [described(name, self.documents[name], transformers=False) for name in sorted(self.used)]
        return "\n".join(lines)


def page(documents: Documents) -> str:
    """The page from the template and the results."""
    figures = Figures(documents)
    text = Path(__file__).with_name("papers.md").read_text(encoding="utf-8")
    filled = FIGURE.sub(lambda match: match[0] if match[1] == "files" else figures.figure(match[1]), text)
    return filled.replace("[[files]]", figures.files())
