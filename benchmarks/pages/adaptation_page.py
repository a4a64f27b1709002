"""`docs/studies/adaptation.md`: ways of adapting a model, compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from stored import Documents, described

from condense.plots import plot_lines, require_matplotlib

# arms of the study, in the order in which they ran
TITLES = {
    "dense": "dense control",
    "both": "distilled, growing groups",
    "growing": "growing groups",
    "plain": "plain",
    "distilled": "distilled",
    "both-twice": "both, twice the tokens",
    "dense-twice": "dense control, twice the tokens",
    "lora-64": "both, LoRA of rank 64",
    "qkv": "both, q, k, v only",
    "none": "not adapted",
    "alternate": "both, every other step dense",
    "lora-16": "both, LoRA of rank 16",
    "last": "both, CCA: last query, weighted keys",
    "dga": "both, DGA: a tenth focal",
    "matched": "both, matched biases",
    "unbiased": "both, no bias",
    "half": "both, half of the loss the KL",
    "wide-1024": "both, window 1,024",
    "slow": "both, learning rate 3e-4",
    "latents": "both, LCA on latents",
}
# measured shapes, in the page's order
SHAPES = (
    "adaptation-shape-32768-llama-3.2-1b-nvidia-h200-20261122T124300Z",
    "adaptation-shape-65536-llama-3.2-1b-nvidia-h200-20261122T092636Z",
    "adaptation-shape-fsdp2-llama-3.1-8b-4-nvidia-h200-20261122T124300Z",
    "adaptation-shape-fsdp2-llama-3.2-1b-4-nvidia-h200-20261122T124300Z",
    "adaptation-longest-llama-3.2-1b-nvidia-h200-20261122T092636Z",
    "adaptation-longest-dense-llama-3.2-1b-nvidia-h200-20261122T185811Z",
)
# rates in a model of a billion weights, and a run with the best of them
BILLION = "adaptation-1b-nvidia-h200-20261129T074156Z"
# what every model was measured with besides its own method and dense attention
CHANGED = ("g 8", "g 32", "w 1,024", "w 2,048", "window", "recall")


class Row(NamedTuple):
    """An arm and its bases, a number that counts the result files with bases of that architecture."""

    arm: str
    bases: int = 1

    @property
    def title(self) -> str:
        return TITLES[self.arm] + (f" [{self.bases}]" if self.bases > 1 else "")


Results = Mapping[Row, Mapping[int, Mapping[str, Any]]]  # by seed
LEARNED = 0.9  # share of what the dense control finds in the end
_SHOWN = (0.1, 0.25, 0.5, 0.75, 1.0)  # shares of the steps
_DRAWN = ("dense", "both", "growing", "plain", "distilled", "alternate")


def write_page(results: Documents, billion: Documents, shapes: Documents, output: Path) -> None:
    """Fill ``adaptation.md`` with the tables of ``results`` (lists of runs), of the model of a billion weights and of
    measured shapes; draw a picture.
    """
    picture = output.with_suffix(".png")
    require_matplotlib(picture)
    bases, found = _read(results)
    phase = next(iter(found[Row("dense")].values()))["phase"]
    parts = {
        "STEPS": f"{phase['steps']:,}",
        "TOKENS": f"{phase['steps'] * phase['batch_size'] * phase['sequence_length'] / 1e6:.1f}",
        "ORIGIN": "\n".join(starmap(described, {**results, **billion, **shapes}.items())),
        "BASES": _bases(bases),
        "ARMS": _arms(found),
        "PICTURE": picture.name,
        "FOUND": _curves(found),
        "POSITIONS": _positions(found),
        "CHANGED": _changed(found),
        "RATES": _rates(billion[BILLION]["results"]),
        "SHAPES": _shapes(shapes),
    }
    page = Path(__file__).with_name("adaptation.md").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text)
    output.write_text(page, encoding="utf-8")
    _draw(found, picture)


def _read(documents: Documents) -> tuple[dict[Row, Mapping[int, Any]], dict[Row, dict[int, Any]]]:
    """Bases and arms, by seed; a base has its architecture's name in place of an arm's."""
    files, bases, found = Counter[str](), {}, {}
    for runs in documents.values():
        contents = [run["results"] for run in runs]
        files.update({_base(content) for content in contents})
        for content in sorted(contents, key=lambda content: content["seed"]):
            name, number = _base(content), files[_base(content)]
            if "arm" in content:
                found.setdefault(Row(content["arm"], number), {})[content["seed"]] = content
            else:
                bases.setdefault(Row(name, number), {})[content["seed"]] = content
    order = list(TITLES)
    return bases, {row: found[row] for row in sorted(found, key=lambda row: (order.index(row.arm), row.bases))}


def _base_of(arm: str) -> str:
    return "base-mla" if arm == "latents" else "base"


def _base(content: Mapping[str, Any]) -> str:
    """Architecture; files from before there were two do not name the first."""
    return _base_of(content["arm"]) if "arm" in content else content.get("base", "base")


def _draw(found: Results, path: Path) -> None:
    """Draw the shares of facts found during training, a panel for each seed."""
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for row in (Row(arm) for arm in _DRAWN if Row(arm) in found):
        for seed, run in found[row].items():
            steps, shares = ([entry[what] for entry in run["curve"]] for what in ("step", "found"))
            panels.setdefault(f"seed {seed}", {})[row.title] = steps, shares
    plot_lines(panels, path, x_label="steps", y_label="found")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _each(values: Sequence[float | None], digits: int, missing: str = "never") -> str:
    return ", ".join(missing if value is None else f"{value:.{digits}f}" for value in values)


def _measured(run: Mapping[str, Any], what: str, name: str) -> Mapping[str, Any] | None:
    """A run's entry of that name; None if time ended before it was measured."""
    return next((entry for entry in run[what] if entry["name"] == name), None)


def _found(run: Mapping[str, Any], name: str) -> float | None:
    entry = _measured(run, "retrieval", name)
    return None if entry is None else entry["exact"]["share"]


def _loss(run: Mapping[str, Any], name: str) -> float | None:
    entry = _measured(run, "text", name)
    return None if entry is None else entry["loss"]


def _own(row: Row) -> str:
    return "dense" if row.arm.startswith("dense") else "own"


def _control(found: Results, row: Row, seed: int) -> Mapping[str, Any] | None:
    """The dense control of as many tokens, from the same base, else from the first of that seed."""
    if row.arm == "latents":
        return None
    name = "dense-twice" if row.arm.endswith("-twice") else "dense"
    return found.get(Row(name, row.bases), {}).get(seed) or found.get(Row(name), {}).get(seed)


def _bases(bases: Results) -> str:
    rows = []
    for (name, number), seeds in sorted(bases.items()):
        for seed, base in seeds.items():
            cells = [f"{seed}, latents" if name == "base-mla" else f"{seed} [{number}]" if number > 1 else str(seed)]
            for part in base["phases"]:
                last = part["history"][-1]
                cells.append(f"{last['step']:,} steps: {last['dense_answer_accuracy']:.3f}")
            rows.append(cells)
    phases = next(iter(next(iter(bases.values())).values()))["phases"]
    return _table(["seed", *(f"{part['phase']['sequence_length']:,} tokens" for part in phases)], rows)


def _arms(found: Results) -> str:
    rows = []
    for row, runs in found.items():
        own = _own(row)
        above = []
        for seed, run in runs.items():
            control, loss = _control(found, row, seed), _loss(run, own)
            above.append(None if control is None or loss is None else loss - (_loss(control, "dense") or 0.0))
        cells = [
            row.title,
            "" if row.arm == "none" else _each([_learned(found, row, seed) for seed in runs], 0),
            _each([_found(run, own) for run in runs.values()], 3),
            _each([_loss(run, own) for run in runs.values()], 3),
            "" if own == "dense" or row.arm == "latents" else _each(above, 3, "?"),
        ]
        cells += [
            "" if own == "dense" else _each([side(run, "dense") for run in runs.values()], 3)
            for side in (_found, _loss)
        ]
        rows.append([*cells, f"{mean(run['trained'] for run in runs.values()) / 1e6:.2f}M"])
    head = (
        "", "learned at step", "found", "text loss", "above the dense control", "found, dense side",
        "text loss, dense side", "trained",
    )  # fmt: skip
    return _table(head, rows)


def _learned(found: Results, row: Row, seed: int) -> int | None:
    """The first measured step with `LEARNED` of what the seed's dense control found at its end; of all without one."""
    control = _control(found, row, seed)
    wanted = LEARNED * (1.0 if control is None else control["curve"][-1]["found"])
    return next((entry["step"] for entry in found[row][seed]["curve"] if entry["found"] >= wanted), None)


def _curves(found: Results) -> str:
    steps = [entry["step"] for entry in next(iter(found[Row("dense")].values()))["curve"]]
    chosen = [steps[max(0, round(share * len(steps)) - 1)] for share in _SHOWN]
    rows = []
    for row, runs in found.items():
        curves = [{entry["step"]: entry for entry in run["curve"]} for run in runs.values()]
        if all(curves):
            cells = [
                f"{_each([curve[step]['found'] for curve in curves], 2)}; "
                f"{mean(curve[step]['text_loss'] for curve in curves):.2f}"
                for step in chosen
            ]
            rows.append([row.title, *cells])
    return _table(["found; mean text loss, at step", *map(str, chosen)], rows)


def _positions(found: Results) -> str:
    head, rows = ["text loss"], []
    for row, runs in found.items():
        entries = [_measured(run, "text", _own(row)) for run in runs.values()]
        parts = [entry["by_position"] for entry in entries if entry is not None]
        head[1:] = [f"{part['start']:,} to {part['stop'] - 1:,}" for part in parts[0]]
        rows.append([row.title, *(_each([run[i]["loss"] for run in parts], 3) for i in range(len(head) - 1))])
    return _table(head, rows)


def _changed(found: Results) -> str:
    names = ("own", *CHANGED)
    rows = []
    for row, runs in found.items():
        cells = []
        for name in names:
            losses = [loss for run in runs.values() if (loss := _loss(run, name)) is not None]
            shares = _each([_found(run, name) for run in runs.values()], 2, "?")
            cells.append(f"{shares}; {mean(losses):.3f}" if losses else "?")
        rows.append([row.title, *cells])
    return _table(["found; mean text loss", "as trained", *names[1:]], rows)


def _rates(content: Mapping[str, Any]) -> str:
    """KL on the way, by learning rate: of the 120 steps of each, and of the 500 of the best."""
    steps = list(content["rates"][1]["kl"])
    rows = [
        [
            "not trained" if row["learning_rate"] is None else f"{row['learning_rate']:.0e}".replace("e-0", "e-"),
            *(f"{row['kl'][step]:.3f}" if step in row["kl"] else "" for step in steps),
        ]
        for row in content["rates"]
    ]
    run = {str(entry["step"]): f"{entry['condensed_kl']:.3f}" for entry in content["run"]["history"]}
    long = list(run)
    return (
        _table(["rate; KL at step", *steps], rows)
        + "\n\n"
        + _table(["500 steps at 3e-5", *long], [["KL", *run.values()]])
    )


def _shapes(documents: Documents) -> str:
    if not documents:
        return ""
    contents = _joined([document["results"] for document in documents.values()])
    head = "## Models of a billion parameters and more"
    about = (
        "Random weights and tokens, a sequence on each GPU, activations recomputed, cross entropy but in rows that\n"
        "say distilled; groups of 16, window 1,024. Tokens per second are those of the slowest step but the first, in\n"
        'which kernels are compiled; "steps": how many are left. Several GPUs hold the weights by FSDP2.'
    )
    return "\n\n".join([head, about, *map(_shape, contents), *_scaling(contents)]) + "\n\n"


def _joined(contents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, but what was measured of one shape's longest sequences in several files is one."""
    joined: list[dict[str, Any]] = []
    longest: dict[tuple[str, str], dict[str, Any]] = {}
    for content in contents:
        shape = content["shape"], content["train"]
        if "length" not in content and shape in longest:
            longest[shape]["rows"] += content["rows"]
            continue
        if "length" not in content:
            longest[shape] = content
        joined.append(content)
    return joined


def _scaling(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tokens per second on several GPUs, beside as many times one GPU, where both were measured; a sequence on each."""
    speeds: dict[tuple[str, ...], dict[int, int]] = {}
    for content in (content for content in contents if "length" in content):
        for row in content["rows"]:
            name = f"{content['shape']}, {row['name']}, {content['length']:,} tokens"
            speeds.setdefault((name, content["train"]), {})[content["processes"]] = _slowest(row)
    lines = []
    for (name, _), by_processes in speeds.items():
        for processes, speed in by_processes.items():
            if processes > 1 and 1 in by_processes:
                share = speed / processes / by_processes[1]
                lines.append(f"{name}: {processes} GPUs train {share:.0%} of {processes} times what one does.")
    return lines


def _shape(content: Mapping[str, Any]) -> str:
    about = f"{content['shape']}, {'all weights' if content['train'] == 'all' else 'LoRA of rank 16'}"
    if "length" not in content:
        rows = [[r["name"], f"{r['length']:,}", f"{r['tokens_per_second']:,}"] for r in content["rows"]]
        return _table([f"{about}, 1 GPU", "longest sequence", "tokens/s there"], rows)
    # one step of each would be no ratio to rely on
    counted = [row for row in content["rows"] if len(row["tokens_per_second"]) > 2]
    dense = next((_slowest(row) for row in counted if row["name"] == "dense"), None)
    rows = [
        [
            r["name"], f"{_slowest(r):,}", f"{_slowest(r) / dense:.2f}" if dense else "?",
            str(len(r["tokens_per_second"]) - 1), f"{r['peak_gib']:.1f} GiB",
        ]
        for r in content["rows"]
    ]  # fmt: skip
    gpus = f"{content['processes']} GPU{'s' if content['processes'] > 1 else ''}"
    head = [f"{about}, {content['length']:,} tokens, {gpus}", "tokens/s", "of dense", "steps", "peak memory of a GPU"]
    return _table(head, rows)


def _slowest(row: Mapping[str, Any]) -> int:
    """Tokens per second of the slowest step but the first."""
    return min(row["tokens_per_second"][1:])
