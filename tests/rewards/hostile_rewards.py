"""Calls that a pool has to survive; each is loaded by name in a worker."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import Process
from pathlib import Path

SLEEPER = [sys.executable, "-c", "import time; time.sleep(4000)", "areal-like-sleeper"]
kept: list[bytes] = []


def good(text: str) -> str:
    return text


def exit_at_once(_: str) -> None:
    os._exit(0)


def kill_itself(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_itself(_: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def close_everything(_: str) -> None:
    os.closerange(3, 4096)


def catastrophic_regex(_: str) -> None:
    re.match(r"(a+)+$", "a" * 45 + "b")


def busy_in_c(_: str) -> None:
    ctypes.PyDLL(None).sleep(4000)  # keeps the GIL


def allocate(_: str) -> None:
    taken = []
    while True:
        taken.append(os.urandom(16 << 20))
        time.sleep(0.02)


def allocate_in_a_child(_: str) -> None:
    child = Process(target=allocate, args=("",))
    child.start()
    child.join()


def leak(_: str) -> int:
    kept.append(os.urandom(40 << 20))
    return os.getpid()


def _daemon(pids: str) -> None:
    """Start a process that has left session, group, environment and parent, and note its id."""
    if os.fork() == 0:
        os.setsid()
        child = subprocess.Popen(SLEEPER, env={"PATH": os.environ["PATH"]}, start_new_session=True)
        with Path(pids).open("a") as file:
            file.write(f"{child.pid}\n")
        os._exit(0)
    os.wait()


def daemon(pids: str) -> None:
    _daemon(pids)


def daemon_then_killed(pids: str) -> None:
    _daemon(pids)
    kill_itself("")


def daemon_then_hangs(pids: str) -> None:
    _daemon(pids)
    time.sleep(4000)


def worker_pid(_: str) -> int:
    return os.getpid()


def server_pid(_: str) -> int:
    return os.getppid()
