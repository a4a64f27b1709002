"""Capacity and speed of condensed models in vLLM, beside dense vLLM: Llama-3.1-8B's shape, random weights.

    python benchmarks/serving/speed.py OUT.json --attention condensed --measure capacity,decode,first,documents
    python benchmarks/serving/speed.py OUT.json --attention dense --measure capacity,decode

- capacity: requests of 131,072 tokens that run at once.
- decode: time between tokens when so many requests run, prompts cached: whole steps of the engine.
- first: time to the first token of a prompt read alone.
- documents: questions on ten texts of 130,432 tokens that were read before.
- short, long: prompts of 4,096 or 130,560 tokens, 512 tokens of answer, nothing shared, all at once.

Prompts that count as cached were never read: their pages are handed out and hold random numbers.
"""

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine import BATCHED_TOKENS, METHOD, VLLM, llama_engine, prompts_of

from condense.results import write_results

# 512 tokens are left for the answer
LONG = 131072 - 512
ROWS = {
    4096: (1, 32, 128, 192, 256),
    32640: (1, 8, 24, 64, 128, 192),
    LONG: (1, 2, 4, 6, 16, 32, 64, 76, 80, 90),
}
STEPS, SKIPPED = 40, 6


def spread(values):
    """Median, least and most of numbers."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def capacity(engine):
    """Requests of the longest prompts that run at once, most of them cached; each prompt is its own."""
    wanted, cached = (100, 80) if engine.condensed else (8, 4)
    prompts = prompts_of(wanted, LONG, seed=1)
    engine.fill(prompts[:cached])
    before = engine.preempted
    with engine.without_model():
        steps, _ = engine.run(prompts, 500, until=lambda steps: len(steps) > 450)
    return {
        "pages": engine.pages[0], "prompts": wanted, "running": max(step.running for step in steps),
        "answered_in_one_step": max(step.tokens for step in steps), "preempted": engine.preempted - before,
    }  # fmt: skip


def decode(engine, lengths, counts):
    """Time between tokens by length and rows; ends at the first rows that do not all run at once."""
    rows_of = []
    for length in lengths:
        wanted = [rows for rows in counts or ROWS[length] if rows * length <= engine.most_tokens]
        prompts, filled = prompts_of(max(wanted), length, seed=length), 0
        for rows in wanted:
            engine.fill(prompts[filled:rows])
            filled = rows
            full = lambda steps, rows=rows: sum(s.tokens == rows for s in steps) > STEPS + SKIPPED  # noqa: E731
            before = engine.preempted
            steps, answers = engine.run(prompts[:rows], 400, until=full)
            at = [step.time for step in steps if step.tokens == rows][SKIPPED:]
            if len(at) < STEPS:
                rows_of.append({"length": length, "rows": rows, "running": max(s.running for s in steps)})
                print(rows_of[-1], flush=True)
                break
            times = [b - a for a, b in itertools.pairwise(at)]
            row = {
                "length": length,
                "rows": rows,
                "step_ms": spread([1000 * t for t in times]),
                "preempted": engine.preempted - before,
            }
            row["tokens_per_second"] = rows / statistics.median(times)
            row["cached_tokens"] = min(a.cached for a in answers)
            rows_of.append(row)
            print(row, flush=True)
    return rows_of


def first(engine, times):
    """Seconds to the first token of new prompts, one after another; the first of all compiles kernels."""
    prompts = prompts_of(times + 1, LONG, seed=3)
    seconds = [engine.run([prompt], 2)[1][0].first_token for prompt in prompts]
    print(f"first token: {seconds}", flush=True)
    return {"prompt": LONG, "while_compiling": seconds[0], "seconds": seconds[1:]}


def documents(engine):
    """Ten texts, each asked about after all were read: tokens found in the cache, seconds to the first token."""
    texts = prompts_of(10, LONG - 128, seed=4)
    engine.fill(texts)
    questions = [[*text, *question] for text, question in zip(texts, prompts_of(10, 60, seed=5), strict=True)]
    if not engine.condensed:  # nothing is found, and each would be read for ten seconds: only look
        with engine.without_model():
            answers = [engine.run([question], 2)[1][0] for question in questions]
        return {"cached": [a.cached for a in answers]}
    answers = [engine.run([question], 2)[1][0] for question in questions]
    return {"cached": [a.cached for a in answers], "first_token_s": spread([a.first_token for a in answers])}


def traffic(engine, count, length, times):
    """Requests that all arrive at once, each with a prompt of its own and an answer of 512 tokens."""
    before, rates, first_tokens, most = engine.preempted, [], [], 0
    for i in range(times):
        steps, answers = engine.run(prompts_of(count, length, seed=100 + i), 512)
        rates.append(count / steps[-1].time)
        first_tokens += [answer.first_token for answer in answers]
        most = max(most, *(step.running for step in steps))
    return {
        "requests": count, "prompt": length, "answer": 512, "requests_per_second": spread(rates),
        "most_running": most, "preempted": engine.preempted - before, "first_token_s": spread(first_tokens),
    }  # fmt: skip


def numbers(text):
    return [int(x) for x in (text or "").split(",") if x]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--attention", choices=["dense", "condensed"], required=True)
    parser.add_argument("--mode", choices=["default", "graph", "eager"], default="default")
    parser.add_argument("--measure", default="capacity,decode,first,documents,short,long")
    parser.add_argument("--lengths", default=",".join(map(str, ROWS)), help="of decode's prompts")
    parser.add_argument("--rows", help="of decode, for all lengths")
    parser.add_argument("--times", type=int, default=3, help="prompts of first, rounds of short")
    parser.add_argument("--short", type=int, default=96, help="requests of short")
    parser.add_argument("--long", type=int, default=4, help="requests of long")
    args = parser.parse_args()
    start = time.perf_counter()
    engine = llama_engine(args.attention, args.mode)
    engine.condensed = args.attention == "condensed"
    # dense: those that fit; condensed: the largest number of rows tells
    engine.most_tokens = 10**9 if engine.condensed else engine.pages[0] * 16
    content = {
        "vllm": VLLM, "attention": args.attention, "mode": args.mode, "shape": "llama-3.1-8b",
        "method": str(METHOD) if engine.condensed else None, "batched_tokens": BATCHED_TOKENS[args.attention],
        "engine_seconds": time.perf_counter() - start,
    }  # fmt: skip
    print(content, flush=True)
    engine.fill_pages()
    measures = {
        "capacity": lambda: capacity(engine),
        "decode": lambda: decode(engine, numbers(args.lengths), numbers(args.rows)),
        "first": lambda: first(engine, args.times),
        "documents": lambda: documents(engine),
        "short": lambda: traffic(engine, args.short, 4096, args.times),
        "long": lambda: traffic(engine, args.long, LONG, 1),
    }
    for name in args.measure.split(","):
        begun = time.perf_counter()
        content[name] = measures[name]()
        print(f"{name} ({time.perf_counter() - begun:.1f} s): {content[name]}"[:1500], flush=True)
        write_results(args.out, content, seed=0, overwrite=True)


if __name__ == "__main__":
    main()
