"""`recall-device` in vLLM beside dense vLLM with caches in 16, 8 and 4 bits, one after another, with the same flags.

    python benchmarks/serving/against_dense.py FOLDER --rounds 3
    python benchmarks/serving/against_dense.py FOLDER --only recall-device,dense --mode graph
    python benchmarks/serving/against_dense.py FOLDER --only recall-device,dense --mode eager --trial    # on a CPU

Each is `speed.py` in a process of its own, whose results lie in FOLDER/NAME.json as far as it came: medians of one
request's step and of the most tokens a second at 130,561 tokens, first token of 130,560, requests of 131,072 tokens at
once, 48 prompts of 4,096. One that fails or takes longer than --limit seconds is left, and the next begun. The table at
the end is of all results in FOLDER.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

DENSE = ("--attention", "dense")
SYSTEMS = {
    "recall-device": ("--attention", "condensed", "--method", "recall-device"),
    "dense": DENSE,
    "dense-fp8": (*DENSE, "--cache", "fp8"),
    "dense-int4": (*DENSE, "--cache", "int4_per_token_head"),
}
LENGTH = "decode-130561"
ROUND = "first", LENGTH, "short"


def run(name, args):
    """Time one system; True if all was measured."""
    out = args.folder / f"{name}.json"
    program = [sys.executable, str(Path(__file__).with_name("speed.py")), str(out), *SYSTEMS[name]]
    # one more first token, as kernels may be compiled on the way
    measures = "first", *ROUND * args.rounds, "capacity"
    command = [*program, "--measure", ",".join(measures), "--mode", args.mode, "--pages", str(args.pages)]
    try:
        done = subprocess.run([*command, *(["--trial"] if args.trial else [])], timeout=args.limit, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name}: left after {args.limit} s", flush=True)
        return False
    return done.returncode == 0


def row(name, results):
    """One system's line of the table; a dash where nothing was measured."""
    firsts = [seconds for seconds in results.get("first", []) if seconds is not None]
    steps = {}
    for part in results.get(LENGTH, []):
        for each in part or ():
            steps.setdefault(each["rows"], []).extend([each["step_ms"]["median"]] if "step_ms" in each else [])
    rates = {rows: 1000 * rows / median(ms) for rows, ms in steps.items() if ms}
    most = max(rates, key=rates.__getitem__, default=None)
    at_once = next((part["running"] for part in results.get("capacity", []) if part), None)
    short = [part["requests_per_second"] for part in results.get("short", []) if part]
    cells = (
        name,
        f"{median(steps[1]):.2f}" if 1 in rates else "-",
        "-" if most is None else f"{rates[most]:.0f} with {most}",
        f"{min(firsts):.2f}" if firsts else "-",
        "-" if at_once is None else str(at_once),
        f"{median(short):.2f}" if short else "-",
    )
    return f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(SYSTEMS), help="some of the systems, in this order")
    parser.add_argument("--mode", choices=["default", "graph", "eager"], default="default")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pages", type=int, default=112, help="GiB of pages")
    parser.add_argument("--limit", type=int, default=1200, help="seconds for one system")
    parser.add_argument("--trial", action="store_true", help="a small model and short prompts")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - SYSTEMS.keys():
        parser.error(f"--only: wanted some of {', '.join(SYSTEMS)}, got {', '.join(sorted(unknown))}")
    args.folder.mkdir(parents=True, exist_ok=True)
    is_done = [run(name, args) for name in names]
    print("| | step, ms | tokens/s | first token, s | at once | 4K, requests/s |\n|---|---|---|---|---|---|")
    for name in SYSTEMS:
        path = args.folder / f"{name}.json"
        if path.exists():
            print(row(name, json.loads(path.read_text(encoding="utf-8"))["results"]))
    sys.exit(not all(is_done))


if __name__ == "__main__":
    main()
