"""Code as in a new interpreter that has imported torch and nothing of te_mx: in a fork of one such
process, because `import torch` takes longer than what tests do then."""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

# Reads [code, environment, folder, files of its output, seconds]; answers with the fork's status.
_SERVER = """
import json, os, signal, sys, torch
for line in sys.stdin:
    code, environment, folder, said, seconds = json.loads(line)
    if not (child := os.fork()):
        for number, path in enumerate(said, 1):
            os.dup2(os.open(path, os.O_WRONLY), number)
        signal.alarm(seconds)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        exec(code, {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)
    return server


def python(code: str, seconds: int = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """What code says, as that of `python -c`, with its status; an end by a signal is negative. What
    OpenMP or Python read of the environment when they start is not changed."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        here = {**os.environ, **environment}, os.getcwd()
        words = [code, *here, [out.name, err.name], seconds]
        server.stdin.write(json.dumps(words) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        said = (file.read().decode(errors="replace") for file in (out, err))
        return subprocess.CompletedProcess(code, status, *said)


def run_file(
    path: Path | str, *arguments: object, seconds: int = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The same, of `python path arguments ..`, which finds the modules that the caller finds."""
    words, paths = [str(path), *map(str, arguments)], [str(Path(path).parent), *sys.path]
    code = f"import runpy, sys; sys.argv, sys.path = {words}, {paths}\n"
    return python(code + "runpy.run_path(sys.argv[0], run_name='__main__')", seconds, **environment)


_RANKS = """
import os, runpy, signal, sys, torch
sys.argv, sys.path = {words}, {paths}
import {imports}
torch.set_num_threads(1)
os.environ.update(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="{port}")
started = []
for rank in "01":
    if not (child := os.fork()):
        signal.alarm({seconds})
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    started.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in started]))
"""


def torchrun(
    path: Path | str, *arguments: object, imports: str, seconds: int = 300
) -> subprocess.CompletedProcess[str]:
    """The same, of `torchrun --nproc-per-node 2 path arguments ..`, whose processes have the
    modules `imports` when they start."""
    words, paths = [str(path), *map(str, arguments)], [str(Path(path).parent), *sys.path]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    code = _RANKS.format(words=words, paths=paths, imports=imports, port=port, seconds=seconds)
    return python(code, seconds)
