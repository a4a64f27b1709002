"""`condense serve` asked by eight clients at once: the hidden numbers that the bundled model finds.

    python benchmarks/serving/server.py OUT.json [vLLM's flags]

Eight questions on a text of 3,900 tokens, four times each, greedy, over HTTP.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import condense
from condense.demo import demo_model, demo_prompt
from condense.results import write_results

METHOD = condense.CCA(window=256, summary="streaming", key_pooling="select", rep_bias="log_size")
URL = "http://127.0.0.1:8123"
FLAGS = ("--port", "8123", "--max-model-len", "4096", "--served-model-name", "bundled")


def folder():
    """The bundled model, saved condensed, with its tokenizer."""
    path, (model, tokenizer) = Path(tempfile.mkdtemp()), demo_model()
    condense.apply(model, METHOD).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def ask(prompt):
    body = {"model": "bundled", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["text"]


def wait_for(process):
    """Waits until the server answers; raises if its process has ended."""
    while True:
        assert process.poll() is None, "the server has ended"
        try:
            urllib.request.urlopen(f"{URL}/health", timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return


def main():
    out, *flags = sys.argv[1:]
    prompt = demo_prompt()
    questions = [prompt.text + question for question in prompt.questions] * 4
    command = [sys.executable, "-m", "condense.cli.main", "serve", str(folder()), *FLAGS, *flags]
    process = subprocess.Popen(command, env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    try:
        wait_for(process)
        start = time.perf_counter()
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(ask, questions))
        seconds = time.perf_counter() - start
    finally:
        process.terminate()
        process.wait(60)
    right = sum(number in answer for number, answer in zip(prompt.expected * 4, answers, strict=True))
    content = {"questions": len(questions), "right": right, "clients": 8, "seconds": seconds, "method": str(METHOD)}
    print(content, flush=True)
    write_results(out, content, overwrite=True)


if __name__ == "__main__":
    main()
