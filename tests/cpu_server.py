"""A real SGLang server on a machine without GPUs, as a run starts it."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

import psutil
import pytest
from limits import HUNG_S


@dataclass(frozen=True)
class RunningServer:
    """A server of the session; who changes its weights loads `model`'s again (POST /update_weights_from_disk)."""

    url: str
    token: str
    model: Path  # Hugging Face directory: Qwen3 with random weights and the arithmetic tokenizer
    log_file: Path

    @property
    def headers(self) -> dict[str, str]:
        """What a request has to send to be let in."""
        return {"Authorization": f"Bearer {self.token}"}


@contextmanager
def server_on_cpu(
    config: Any, model: Path, folder: Path, *, launcher: str | None = None, routes: bool = False
) -> Iterator[RunningServer]:
    """A real SGLang server on loopback, as a run on CPU starts it; `launcher` is a module in the place of the run's."""
    from allocation import ParallelSizes
    from areal_like.backends.sglang import LAUNCHER, TOKEN_VARIABLE
    from areal_like.backends.sglang.options import server_arguments
    from areal_like.capabilities.router_replay.columns import ROUTES
    from areal_like.runtime.ports import reserve_port

    log_file, tmp = folder / "server.log", folder / "tmp"
    tmp.mkdir()
    reserved, token = reserve_port("127.0.0.1"), secrets.token_hex(16)
    port = reserved.getsockname()[1]
    options = server_arguments(config, model, ParallelSizes(), "cpu", columns=[ROUTES] if routes else ())
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", launcher or LAUNCHER, *options, "--host", "127.0.0.1", "--port", str(port)],
            env={
                **os.environ,
                **({"PYTHONPATH": os.pathsep.join(sys.path)} if launcher else {}),
                TOKEN_VARIABLE: token,
                "TMPDIR": str(tmp),
                "SPT_NOENV": "1",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = RunningServer(f"http://127.0.0.1:{port}", token, model, log_file)
    try:
        _wait_until_healthy(server, process)
        yield server
    finally:
        reserved.close()
        shared = shared_memory(process.pid)
        process.kill()  # its children notice and go with it
        process.wait()
        for file in shared:
            file.unlink(missing_ok=True)


def shared_memory(pid: int) -> set[Path]:
    """Return files of /dev/shm that a process and its children map; SGLang removes none of them itself."""
    found: set[Path] = set()
    with suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(OSError):  # one that has ended meanwhile has no maps, the others do
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                found |= {Path(name) for name in re.findall(r"/dev/shm/\S+", maps)}
    return found


def _wait_until_healthy(server: RunningServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + HUNG_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(server.url + "/health", timeout=HUNG_S):
                return
        except (URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
    pytest.fail(f"SGLang did not start; {server.log_file} ends:\n{server.log_file.read_text()[-3000:]}")
