"""Ray clusters that are not the run's, for tests."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class ExistingCluster:
    """`env` is what a process needs to be let in."""

    address: str
    env: dict[str, str]
    head: subprocess.Popen[str]
    n_cpus: int

    def take_gpus(self) -> None:
        """Another job takes the first free GPU of every node, until the cluster ends."""
        self._tell("take")

    def add_node(self, n_cpus: int | None = None) -> None:
        """A further node of the same size joins, or with other CPUs."""
        self._tell(f"add {n_cpus or self.n_cpus}")

    def remove_node(self) -> None:
        """The node that joined last fails."""
        self._tell("remove")

    def _tell(self, what: str) -> None:
        self.head.stdin.write(f"{what}\n")  # type: ignore[union-attr]
        self.head.stdin.flush()  # type: ignore[union-attr]
        assert self.head.stdout.readline() == "done\n"  # type: ignore[union-attr]


@contextmanager
def existing_cluster(n_nodes: int, n_gpus: int, n_cpus: int = 4, **env: str) -> Iterator[ExistingCluster]:
    """A cluster on loopback with fake GPUs; `env` is its nodes' alone. There is a CPU for each GPU at least."""
    # Ray takes a loopback address for the host's own, where this cluster does not listen.
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    head = subprocess.Popen(
        [sys.executable, str(HERE / "head.py"), str(n_nodes), str(n_gpus), str(max(n_cpus, n_gpus))],
        env={**os.environ, "PYTHONPATH": str(ROOT), **secret, **loopback, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    address = head.stdout.readline().strip()  # type: ignore[union-attr]
    try:
        yield ExistingCluster(address, secret | loopback, head, max(n_cpus, n_gpus))
    finally:
        head.communicate()
    assert head.returncode == 0
