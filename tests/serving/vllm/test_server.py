"""`condense serve` on the bundled model as it is, without `--method`: an OpenAI server, its clients, bad input."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import condense
from condense.demo import demo_model
from condense.models.fit import USED, cache_fits, weight_bytes

METHOD = condense.Method.parse("recall-device")
LONGEST = 2048
# the second is longer than the window
PROMPTS = ["The old man", "Once upon a time there was " * 200, "She said", "It was a dark night and " * 30]
NEW = 12
# bytes of pages, as this folder's environment and settings give them
POOL = 1 << (28 if torch.cuda.is_available() else 30)
SAID = re.compile(
    rf"Concurrency for {LONGEST:,} tokens per request, once their prompts are read: ([\d.]+)x; each takes "
    r"([\d.]+) MiB, (\d+)% of dense attention's, a request of 1,024 tokens (\d+)%"
)


class Server:
    def __init__(self, folder, log, device_flags):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        flags = ["--port", self.port, "--dtype", "float32", "--max-model-len", LONGEST, *device_flags]
        flags += ["--served-model-name", "bundled", "--max-num-seqs", 8]
        command = [sys.executable, "-m", "condense.cli.main", "serve", str(folder), *map(str, flags)]
        self.log, env = log, {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self.process = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=env)

    def wait(self, seconds=600):
        for _ in range(seconds):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(1)
        raise AssertionError(self.log.read_text()[-3000:])

    def ask(self, verb, path, data=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(verb, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read().decode()
        connection.close()
        return answer.status, content

    def complete(self, prompt, **options):
        fixed = {"model": "bundled", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        return self.ask("POST", "/v1/completions", json.dumps({**fixed, **options}))

    def text(self, prompt):
        status, content = self.complete(prompt)
        assert status == 200, content
        return json.loads(content)["choices"][0]["text"]


@pytest.fixture(scope="module")
def bundled():
    model, tokenizer = demo_model()
    return condense.apply(model, METHOD), tokenizer


@pytest.fixture(scope="module")
def server(bundled, tmp_path_factory, device_flags):
    started = Server(bundled[0].name_or_path, tmp_path_factory.mktemp("log") / "server.txt", device_flags)
    try:
        started.wait()
        yield started
    finally:
        started.process.terminate()
        started.process.wait(60)


@pytest.fixture(scope="module")
def wanted(bundled, greedy):
    model, tokenizer = bundled
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert METHOD.window < len(ids[1]) < LONGEST - 500, len(ids[1])
    return [tokenizer.decode(row) for row in greedy(model, ids, NEW)]


def test_eight_clients_at_once(server, wanted):
    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(server.text, PROMPTS * 2)) == wanted * 2


def test_streaming(server, wanted):
    status, content = server.complete(PROMPTS[1], stream=True)
    assert status == 200
    lines = [line.removeprefix("data: ") for line in content.splitlines() if line]
    assert lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == wanted[1]


def test_stop_strings(server, wanted):
    stop = wanted[2].split()[2]
    status, content = server.complete(PROMPTS[2], stop=[stop], n=2, top_k=1, temperature=1)
    assert status == 200, content
    texts = [choice["text"] for choice in json.loads(content)["choices"]]
    assert texts == [wanted[2].partition(stop)[0]] * 2


def test_bad_requests_are_answered_and_change_nothing(server, wanted):
    assert server.ask("POST", "/v1/completions", '{"model": "bundled", "prompt":')[0] == 400
    for answer, limit in (
        (server.complete("word " * 3000), f"{LONGEST} tokens"), (server.complete("word", max_tokens=-1), "at least 1"),
    ):  # fmt: skip
        assert answer[0] == 400
        assert limit in answer[1]
    assert server.complete("word", model="another")[0] == 404
    assert server.text(PROMPTS[0]) == wanted[0]


def test_a_client_that_goes_away(server, wanted):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": "bundled", "prompt": PROMPTS[3], "max_tokens": 500, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    connection.getresponse().readline()
    connection.close()
    assert server.text(PROMPTS[2]) == wanted[2]
    for _ in range(60):
        metrics = server.ask("GET", "/metrics")[1].splitlines()
        used = [float(line.split()[-1]) for line in metrics if line.startswith("vllm:kv_cache_usage_perc{")]
        if used == [0.0]:
            return
        time.sleep(0.5)
    raise AssertionError(f"pages of a client that is gone are still held: {used}")


def test_what_is_said_of_concurrency(server, bundled):
    """vLLM counts the pages of tokens in flight. How many requests run once they are read, and their bytes, is said
    below it, as `condense inspect` says it.
    """
    held, mib, share, short_share = map(float, SAID.search(server.log.read_text()).groups())
    model = condense.restore(bundled[0])
    # a byte more than whole, as the share of a device's memory is rounded down
    memory = int((POOL + 1 + weight_bytes(model, 4)) / USED) + 1
    for length, said in ((1024, short_share), (LONGEST, share)):
        dense, *_, own = cache_fits(model, {"own": METHOD}, length, 4, memory=memory)
        assert said == pytest.approx(100 * own.served_bytes / dense.device_bytes, abs=0.5)
    condense.apply(model, METHOD)
    assert int(held) == own.served
    assert mib == pytest.approx(own.served_bytes / 2**20, abs=0.05)
