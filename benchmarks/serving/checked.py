"""Whether vLLM's answers are those of `generate`, before anything is timed: by `correct.py`, each in a process."""

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import condense


def checked(mode, method, has_latents):
    """Answers of a small model in vLLM; ends the program if some are wrong: in float32, but for latents in bfloat16.

    Of the method as it is, in bfloat16, errors are noted beside those of transformers.
    """
    model = "latents" if has_latents else "wide"
    with ThreadPoolExecutor(2) as beside:
        rounded = beside.submit(compared, mode, model, method and first_method(method), "bfloat16")
        exact = None if has_latents else beside.submit(compared, mode, model, method and unrounded(method), "float32")
    found, rounds = rounded.result(), [] if exact is None else exact.result()["rounds"]
    chooses = method is not None and isinstance(condense.Method.parse(first_method(method)), condense.Recall)
    if has_latents:
        wrong = [each for each in (found["text_error"], *(each["error"] for each in found["rounds"])) if is_far(each)]
    else:
        wrong = [answers for answers in rounds if not is_right(answers, chooses)]
    if wrong:
        sys.exit(f"speed: vLLM's answers are not those of generate, so nothing is timed: {wrong}")
    return {"float32": rounds, "bfloat16": {key: found[key] for key in ("method", "rounds", "text_error")}}


def is_far(error):
    """True if vLLM's log-probabilities are off by more than twice as much as those of transformers."""
    return error["vllm"]["rms"] > 2 * error["transformers_bfloat16"]["rms"]


def is_right(answers, chooses):
    """True if a round of answers in float32 is that of `generate`.

    chooses: queries open some groups. Two that are almost as good change places by float32's own noise: weights that
    differ by 3e-7 of their size changed `generate`'s own answers in 5 of 14 runs. Then the log-probabilities of vLLM's
    answers must be those of transformers to a tenth of the error that it has in bfloat16.
    """
    error = answers["error"]
    return answers["same_tokens"] == answers["of"] or (
        chooses and 10 * error["vllm"]["rms"] <= error["transformers_bfloat16"]["rms"]
    )


def compared(mode, model, method, dtype):
    """Results of `correct.py` with one of its models."""
    program = [sys.executable, str(Path(__file__).with_name("correct.py"))]
    with tempfile.TemporaryDirectory() as folder:
        reference, out = f"{folder}/reference.pt", f"{folder}/out.json"
        chosen = [] if method is None else ["--method", method]
        engine = ["--mode", mode, "--dtype", dtype]
        subprocess.run([*program, "reference", reference, "--model", model, *chosen], check=True)
        subprocess.run([*program, "engine", reference, out, "--model", model, *engine], check=True)
        return json.loads(Path(out).read_text(encoding="utf-8"))["results"]


def first_method(text):
    """The first method of a choice in text."""
    return text.partition("+")[0].partition("@")[0]


def unrounded(text):
    """The first method of a choice in text, with all its numbers in 16 bits.

    What is rounded to 8 or 4 bits makes of float32's own noise other numbers, and then other tokens.
    """
    method = condense.Method.parse(first_method(text))
    bits = dict.fromkeys((x for x in ("store_bits", "entry_bits") if hasattr(method, x)), 16)
    settings = method.replace(**bits).to_dict()
    name = settings.pop("method")
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in settings.items() if value is not None)
