"""Processes of their own, forked from one that has imported torch and transformers (this takes long), not condense."""

import multiprocessing
import os
import signal
import socket

SECONDS = 240
_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(["torch", "transformers.models.auto.modeling_auto", "transformers.modeling_utils"])


def start(function, *arguments, **environment):
    """Call a module's function in a process of its own, with more in its environment."""
    process = _fork.Process(target=_call, args=(environment, function, arguments))
    process.start()
    return process


def _call(environment, function, arguments):
    # a shell starts background jobs, and so maybe this test run, with the interrupt ignored; children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    function(*arguments)


def finish(*processes):
    """The exit codes of processes, None for those that have not ended in time; pytest shows their errors."""
    try:
        for process in processes:
            process.join(SECONDS)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def run(function, *arguments):
    assert finish(start(function, *arguments)) == [0]


def run_ranks(count, function, *arguments, **environment):
    """Call a function with each rank of a group of ``count`` in its environment, as torchrun would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    group |= {"LOCAL_WORLD_SIZE": str(count), **environment}
    ranks = [start(function, *arguments, **group, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]
    assert finish(*ranks) == [0] * count
