"""Two processes of one group, started as torchrun would, which itself takes as long to import torch as either."""

import os
import socket
import subprocess
import sys
import tempfile

SECONDS = 240


def run_two(script, *arguments, **environment):
    """Run a script with ranks 0 and 1, and more in its environment; fail with what the first of them to fail said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, str(script), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as said:
        processes = [
            subprocess.Popen(
                command,
                env=os.environ | group | {"RANK": rank, "LOCAL_RANK": rank} | environment,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            for rank in "01"
        ]
        try:
            codes = [process.wait(SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
        said.seek(0)
        assert codes == [0, 0], said.read()[-6000:]
