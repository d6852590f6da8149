"""The report of a run's node about itself and of its connections to others, from a process on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def probe_class() -> type:
    """Return a class that Ray sends by value: it needs nothing of this package on the node."""

    class Probe:
        def now(self) -> float:
            import time

            return time.time()

        def open_port(self, host: str, ports: Sequence[int]) -> tuple[int, str]:
            """Listen at one of the ports until this process ends; return it, or 0 and why none can be opened."""
            import socket

            why = ""
            for port in ports:
                try:
                    self.listener = socket.create_server(
                        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
                    )
                except OSError as error:
                    why = str(error.strerror)
                else:
                    return self.listener.getsockname()[1], ""
            return 0, why

        def find_unreachable(self, urls: Sequence[str], limit_s: float) -> list[str]:
            import socket
            from concurrent.futures import ThreadPoolExecutor
            from urllib.parse import urlsplit

            def reaches(url: str) -> bool:
                address = urlsplit(url)
                try:
                    socket.create_connection((address.hostname, address.port), limit_s).close()
                except OSError:
                    return False
                return True

            with ThreadPoolExecutor(32) as threads:
                reached = list(threads.map(reaches, urls))
            return [url for url, is_reached in zip(urls, reached, strict=True) if not is_reached]

        def facts(self, packages: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
            import os
            import platform
            import shutil
            import subprocess
            import tempfile
            from importlib.metadata import PackageNotFoundError, version

            def find_version(name: str) -> str | None:
                try:
                    return version(name)
                except PackageNotFoundError:
                    return None

            shown: list[list[str]] = []
            if program := shutil.which("nvidia-smi"):
                command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
                told = subprocess.run(command, capture_output=True, text=True, timeout=60)
                shown = [line.split(", ") for line in told.stdout.splitlines() if told.returncode == 0]
            with open("/proc/meminfo") as file:
                memory = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in file)}
            try:
                with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
                    own_ports = [int(word) for word in file.read().split()]
            except OSError:  # a system without it chooses as it likes
                own_ports = []
            temporary = tempfile.gettempdir()
            return {
                "python": platform.python_version(),
                "packages": {name: find_version(name) for name in packages},
                "gpus": sorted({each[0] for each in shown}),
                "drivers": sorted({each[-1] for each in shown}),
                "free_memory": memory["MemAvailable"],
                "free_disk": shutil.disk_usage(temporary).free,
                "temporary": temporary,
                "own_ports": own_ports,
                "missing": [path for path in paths if not os.path.exists(path)],
            }

    return Probe
