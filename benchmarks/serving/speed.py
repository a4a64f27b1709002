"""Capacity and speed of condensed models in vLLM, beside dense vLLM: a large model's shape, random weights.

    python benchmarks/serving/speed.py OUT.json --attention condensed --measure first,first,decode-130561,first
    python benchmarks/serving/speed.py OUT.json --attention dense --measure capacity,decode-4097,decode-32769
    python benchmarks/serving/speed.py OUT.json --attention dense --cache fp8 --measure capacity,decode-130561
    python benchmarks/serving/speed.py OUT.json --attention condensed --shape deepseek-v2-lite --method pooled
    python benchmarks/serving/speed.py OUT.json --attention dense --shape llama-3.1-70b-fp8 --ranks 2
    python benchmarks/serving/speed.py OUT.json --attention condensed --method recall-device --trial    # on a CPU

What is measured, in this order; a name that comes again is measured again:

- capacity: requests of 131,072 tokens (or --longest) that run at once.
- decode-LENGTH: time between tokens, whole steps of the engine, while more and more requests run, at last as many as
  fit, prompts cached but for one token; the first answers are up to 500 tokens long by then. With tokens in host
  memory also the groups that a step copied to slots, and the time of steps that copy all.
- first: time to the first token of a prompt read alone.
- documents: questions on ten texts of 130,432 tokens that were read before.
- short, long: prompts of 4,096 or 130,560 tokens, 512 tokens of answer, nothing shared, all at once.

Prompts that count as cached were never read: their pages are handed out and hold random numbers.

Before anything is timed, a small random model must give `generate`'s answers in float32 in the same mode of vLLM, read
and from the prefix cache (`correct.py`, in processes of its own, while the engine starts); otherwise nothing is. vLLM
runs no model with latents in float32 on a GPU: there, errors in bfloat16 must be at most twice those of transformers.
Results are written after every measurement and every number of rows, so that a run that is cut off loses little.
`against_dense.py` runs all that is compared.

--trial takes a model of two small layers and lengths 16 times shorter, under the same names: it tries the program.
"""

import argparse
import itertools
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from checked import checked
from engine import BATCHED_TOKENS, METHOD, PAGES_GIB, SHAPES, SHORTER, VLLM, engine_of, prompts_of

import condense
from condense.results import write_results

# 512 tokens are left for the answer
LONG, LONGER, ANSWER = 131072 - 512, 524288 - 512, 511
# one token more than whole pages of entries, which are what can be cached
ROWS = {
    4096 + 1: (1, 2, 4, 8, 16, 32, 64, 128, 192, 256),
    32768 + 1: (1, 2, 4, 8, 16, 24, 64, 128, 192, 256),
    LONG + 1: (1, 2, 4, 6, 12, 16, 20, 32, 40, 90),
    LONGER + 1: (1, 2, 4, 6),
}
DECODES = {f"decode-{length}": length for length in ROWS}
MEASURES = ("capacity", *DECODES, "first", "documents", "short", "long")
# few enough that the first requests still have tokens to answer with when up to ten numbers of rows were timed
STEPS, SKIPPED = 40, 5


def spread(values):
    """Median, least and most of numbers."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def capacity(engine, seed):
    """Requests of the longest prompts that run at once, most of them cached; each prompt is its own."""
    fits = engine.fits(engine.longest + ANSWER)
    prompts = prompts_of(fits + 4, engine.longest, seed)
    engine.fill(prompts[: fits * 7 // 8])
    before = engine.preempted

    def is_full(steps):
        """True once nobody has joined for longer than a prompt takes, or the first answers end."""
        return len(steps) > 450 or (len(steps) > 80 and steps[-1].running == steps[-80].running)

    with engine.without_model():
        steps, _ = engine.run(prompts, 500, until=is_full)
    return {
        "pages": engine.pages[0], "prompts": len(prompts), "running": max(step.running for step in steps),
        "answered_in_one_step": max(step.tokens for step in steps), "preempted": engine.preempted - before,
    }  # fmt: skip


def decode(engine, length, choices, note):
    """Time between tokens by rows: requests join those that run; ends at the first rows that do not all run at once.

    choices: numbers of rows, of which those that fit are timed, and as many as fit. note: gets all rows after each.
    """
    # of more, the pages of the first would be gone by the time that they are asked about
    fits = min(engine.fits(length + ANSWER), max(choices))
    wanted = sorted({rows for rows in choices if rows <= fits} | {fits})
    prompts, before = prompts_of(max(wanted), length, seed=length), engine.preempted
    engine.fill(prompts)
    rows_of, names, answers = [], [], {}
    for rows in wanted:
        names += engine.add(prompts[len(names) : rows], ANSWER)
        at = []
        # new requests may take some steps to be read
        for _ in range(2 * (SKIPPED + STEPS)):
            step = engine.step(answers)
            if step.tokens == rows:
                at.append(step.time)
            if len(at) > SKIPPED + STEPS:
                break
        else:
            rows_of.append({"rows": rows, "running": step.running})
            break
        times = [b - a for a, b in itertools.pairwise(at[SKIPPED:])]
        row = {"rows": rows, "step_ms": spread([1000 * t for t in times]), "preempted": engine.preempted - before}
        row["tokens_per_second"] = rows / statistics.median(times)
        row["cached_tokens"] = min(answers[name].cached for name in names)
        rows_of.append(row)
        note(rows_of)
        if engine.has_slots:
            row |= over_the_bus(engine, rows, answers)
            note(rows_of)
        print(length, row, flush=True)
    engine.stop(names)
    return rows_of


def over_the_bus(engine, rows, answers):
    """Groups that one step copied to slots, per request, KV head and layer; the time of steps before which slots were
    emptied, which is a part of it.
    """
    engine.new_copies(rows)
    engine.step(answers)
    found, at = engine.new_copies(rows), []
    for _ in range(STEPS // 4 + 1):
        engine.forget_copies()
        at.append(engine.step(answers).time)
    return {"new_copies": found, "all_new_ms": spread([1000 * (b - a) for a, b in itertools.pairwise(at)])}


def first(engine, seed):
    """Seconds to the first token of a new prompt, alone; the first of all compiles kernels."""
    return engine.run(prompts_of(1, engine.longest, seed), 2)[1][0].first_token


def documents(engine, seed):
    """Ten texts, each asked about after all were read: tokens found in the cache, seconds to the first token."""
    texts = prompts_of(10, engine.longest - 128, seed)
    engine.fill(texts)
    questions = [[*text, *question] for text, question in zip(texts, prompts_of(10, 60, seed + 1), strict=True)]
    if not engine.condensed:  # no text is found in the cache, and to read each takes ten seconds: only look
        with engine.without_model():
            answers = [engine.run([question], 2)[1][0] for question in questions]
        return {"cached": [a.cached for a in answers]}
    answers = [engine.run([question], 2)[1][0] for question in questions]
    return {"cached": [a.cached for a in answers], "first_token_s": spread([a.first_token for a in answers])}


def traffic(engine, seed, count, length):
    """Requests that all arrive at once, each with a prompt of its own and an answer of 512 tokens."""
    before = engine.preempted
    steps, answers = engine.run(prompts_of(count, length, seed), 512)
    return {
        "requests": count, "prompt": length, "answer": 512, "requests_per_second": count / steps[-1].time,
        "most_running": max(step.running for step in steps), "preempted": engine.preempted - before,
        "first_token_s": spread([answer.first_token for answer in answers]),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--attention", choices=["dense", "condensed"], required=True)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share each layer")
    parser.add_argument("--longest", type=int, default=131072, help="tokens of the longest request, with its answer")
    parser.add_argument("--mode", choices=["default", "graph", "eager"], default="default")
    usual = [name for name in MEASURES if DECODES.get(name, 0) <= LONG + 1]
    parser.add_argument("--measure", default=",".join(usual), help="also decode-523777, with --longest 524288")
    parser.add_argument("--short", type=int, default=48, help="requests of short")
    parser.add_argument("--long", type=int, default=2, help="requests of long")
    parser.add_argument("--cache", default="auto", help="of dense attention, as vLLM's --kv-cache-dtype")
    parser.add_argument("--method", help="as of condense serve; by layers, as a@0-15+b@16-31. Default: pooling")
    parser.add_argument("--pages", type=int, default=PAGES_GIB, help="GiB of pages; a trial has 1")
    parser.add_argument("--trial", action="store_true", help="a small model and short prompts")
    args = parser.parse_args()
    is_condensed, shorter = args.attention == "condensed", SHORTER if args.trial else 1
    if is_condensed and args.cache != "auto":
        parser.error(f"--cache: wanted auto beside --attention condensed, got {args.cache}")
    names = args.measure.split(",")
    if unknown := set(names) - set(MEASURES):
        parser.error(f"--measure: wanted some of {', '.join(MEASURES)}, got {', '.join(sorted(unknown))}")
    if too_long := [name for name in names if DECODES.get(name, 0) + ANSWER > args.longest]:
        parser.error(f"--longest: wanted room for {', '.join(too_long)}, got {args.longest}")
    with ThreadPoolExecutor(1) as beside:
        # the engine starts meanwhile, and waits
        has_latents = "kv_lora_rank" in SHAPES[args.shape].config
        check = beside.submit(checked, args.mode, args.method, has_latents) if is_condensed else None
        begun = time.perf_counter()
        engine = engine_of(
            args.shape, args.attention, args.mode, method=args.method, longest=args.longest,
            pages_gib=1 if args.trial else args.pages, is_trial=args.trial, kv_cache_dtype=args.cache,
            tensor_parallel_size=args.ranks, disable_custom_all_reduce=True,
        )  # fmt: skip
        start = time.perf_counter() - begun
        found = check and check.result()
    engine.condensed, engine.longest = is_condensed, (args.longest - 512) // shorter
    # a name stands for other settings in other versions
    one = is_condensed and args.method is not None and "@" not in args.method
    content = {
        "vllm": VLLM, "attention": args.attention, "mode": args.mode,
        "shape": f"trial of {args.shape}" if args.trial else args.shape, "ranks": args.ranks,
        "method": (args.method or str(METHOD)) if engine.condensed else None,
        "settings": condense.Method.parse(args.method).to_dict() if one else None,
        "batched_tokens": BATCHED_TOKENS[args.attention], "cache": args.cache, "checked": found,
        "engine_start_s": start,
    }  # fmt: skip

    def note(result):
        """The result so far of the measurement that runs, on the disk."""
        content[name][-1] = result
        write_results(args.out, content, seed=0, overwrite=True)

    print(content, flush=True)
    engine.fill_pages()
    measures = {
        "capacity": capacity,
        **{
            name: lambda engine, seed, length=length: decode(engine, (length - 1) // shorter + 1, ROWS[length], note)
            for name, length in DECODES.items()
        },
        "first": first,
        "documents": documents,
        "short": lambda engine, seed: traffic(engine, seed, args.short, 4096 // shorter),
        "long": lambda engine, seed: traffic(engine, seed, args.long, engine.longest),
    }
    for i, name in enumerate(names):
        begun = time.perf_counter()
        content.setdefault(name, []).append(None)
        # seeds of each measurement are its own, so that no prompt was read before
        note(measures[name](engine, 1000 * i))
        print(f"{name} ({time.perf_counter() - begun:.1f} s): {content[name][-1]}"[:1500], flush=True)


if __name__ == "__main__":
    main()
