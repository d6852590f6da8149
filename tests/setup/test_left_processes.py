"""The check at the end of the tests sees what they leave."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import secrets
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
from cpu_server import shared_memory
from left_processes import session_processes


@pytest.mark.parametrize("daemon", [False, True], ids=["child", "orphan"])
def test_a_process_that_is_left_is_found(daemon: bool) -> None:
    program = "import time; print(flush=True); time.sleep(600)"
    if daemon:  # of a process that has ended, in a session of its own
        program = f"import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\nos.execv(sys.executable, [sys.executable, '-c', {program!r}])"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    process.stdout.readline()  # type: ignore[union-attr]
    (left,) = [line for line in session_processes() if "time.sleep(600)" in line]
    found = psutil.Process(int(left.partition(":")[0]))
    found.kill()
    process.wait()
    found.wait()  # also an orphan, before another test looks


def test_a_manager_is_found_and_this_process_s_own_helpers_are_not() -> None:
    before = session_processes()
    context = multiprocessing.get_context("spawn")
    ended: Any = context.Process(target=time.sleep, args=(0,))  # starts the resource tracker, which stays
    ended.start()
    ended.join()
    assert session_processes() == before
    with context.Manager():
        assert len(session_processes()) == len(before) + 1
    assert session_processes() == before


def test_memory_of_a_server_is_found_beside_a_child_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    short = subprocess.Popen(["sleep", "600"])
    ended = psutil.Process(short.pid)
    short.kill()
    short.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [ended])
    name = f"areal-test-{secrets.token_hex(6)}"
    with open(f"/dev/shm/{name}", "xb+") as file:
        try:
            file.truncate(64)
            with mmap.mmap(file.fileno(), 64):
                assert f"/dev/shm/{name}" in {str(found) for found in shared_memory(os.getpid())}
        finally:
            os.unlink(file.name)
