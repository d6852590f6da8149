"""The report of a run's node about itself and its connections to other nodes, from a process on the node.

The module is sent to the node by value, so it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import urlsplit


class NodeProbe:
    """An actor on a node."""

    def now(self) -> float:
        return time.time()

    def open_port(self, host: str, ports: Sequence[int]) -> tuple[int, str]:
        """Listen on one of the ports until this process ends; return the port, or 0 and the reason why all fail."""
        why, family = "", socket.AF_INET6 if ":" in host else socket.AF_INET
        for port in ports:
            try:
                self.listener = socket.create_server((host, port), family=family, backlog=1024)
            except OSError as error:
                why = str(error.strerror)
            else:
                return self.listener.getsockname()[1], ""
        return 0, why

    def find_unreachable(self, urls: Sequence[str], limit_s: float) -> list[str]:
        """Return the addresses that do not accept a connection within the time limit."""
        with ThreadPoolExecutor(32) as threads:
            reached = list(threads.map(lambda url: _reaches(url, limit_s), urls))
        return [url for url, is_reached in zip(urls, reached, strict=True) if not is_reached]

    def facts(self, packages: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
        """Return versions, GPUs, free memory and disk, and which of the paths are missing."""
        gpus = _read_gpus()
        temporary = tempfile.gettempdir()
        return {
            "python": platform.python_version(),
            "packages": {name: _find_version(name) for name in packages},
            "gpus": sorted({each[0] for each in gpus}),
            "drivers": sorted({each[-1] for each in gpus}),
            "free_memory": _read_free_memory(),
            "free_disk": shutil.disk_usage(temporary).free,
            "temporary": temporary,
            "own_ports": _read_own_ports(),
            "missing": [path for path in paths if not os.path.exists(path)],
        }


def _reaches(url: str, limit_s: float) -> bool:
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), limit_s).close()
    except OSError:
        return False
    return True


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read_gpus() -> list[list[str]]:
    """Return name and driver of each GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return [line.split(", ") for line in answer.stdout.splitlines() if answer.returncode == 0]


def _read_free_memory() -> int:
    with open("/proc/meminfo") as file:
        lines = (line.partition(":") for line in file)
        return next(int(rest.split()[0]) << 10 for name, _, rest in lines if name == "MemAvailable")


def _read_own_ports() -> list[int]:
    """Return the first and last port that the kernel chooses from, [] on a system that does not report them."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []
