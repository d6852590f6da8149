"""Which processes of this test session are alive; each has the session's name in its environment."""

from __future__ import annotations

import os
import re
import secrets

import psutil

SESSION = "AREAL_LIKE_TEST_SESSION"
os.environ[SESSION] = secrets.token_hex(6)
OWN_HELPER = re.compile(r"from multiprocessing\.(resource_tracker|forkserver) import")


def session_processes() -> list[str]:
    """Processes that the tests started; those that serve this process's `multiprocessing` end with it."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(SESSION) == os.environ[SESSION] and process.pid != os.getpid()
            command = " ".join(process.cmdline())
            own_helper = process.ppid() == os.getpid() and OWN_HELPER.search(command)
        except (psutil.Error, OSError):  # ended meanwhile, a zombie, or another user's
            continue
        if ours and not own_helper:
            found.append(f"{process.pid}: {command[:200]}")
    return found
