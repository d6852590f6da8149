"""One SGLang server: its command line, and the Ray actor that starts it and notices its end."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from areal_like.cluster.lifetime import reserve_port, spawn
from areal_like.rollout.sglang import LAUNCHER, TOKEN_VARIABLE

if TYPE_CHECKING:
    pass


class ServerDied(RuntimeError):
    """A server process ended or did not become ready; the message holds its last words."""


@dataclass(frozen=True)
class ServerSpec:
    """Everything about a server that is known before it has a host.

    `arguments` are SGLang's own, without host, port and token.
    """

    name: str
    arguments: tuple[str, ...]
    log_file: Path
    token: str
    port: int | None
    startup_timeout_s: float


class SGLangServer:
    """A server process and its end; runs as a Ray actor beside its GPUs."""

    def __init__(self, spec: ServerSpec, host: str) -> None:
        self._spec = spec
        self._host = host

    async def start(self) -> str:
        """Start the process and wait until it serves; returns its URL, raises ServerDied."""
        spec = self._spec
        try:
            reserved = reserve_port(self._host, spec.port or 0)
        except OSError as error:
            what = f"port {spec.port}" if spec.port else "a port"
            raise ServerDied(f"{spec.name} cannot have {what} of {self._host}: {error.strerror}") from error
        with reserved:  # a port that was merely free would be another's by the time that SGLang listens
            return await self._serve(reserved.getsockname()[1])

    async def _serve(self, port: int) -> str:
        spec = self._spec
        command = [sys.executable, "-m", LAUNCHER, *spec.arguments, "--host", self._host, "--port", str(port)]
        self._process = spawn(command, env={TOKEN_VARIABLE: spec.token}, log_file=spec.log_file)
        url = f"http://{self._host}:{port}"
        deadline = time.monotonic() + spec.startup_timeout_s
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {spec.token}"}) as session:
            while not await _healthy(session, url):
                if self._process.poll() is not None:
                    raise self._death("ended before it was ready")
                if time.monotonic() > deadline:
                    raise self._death(f"was not ready within {spec.startup_timeout_s:g} s (rollout.startup_timeout_s)")
                await asyncio.sleep(0.2)
        return url

    async def watch(self) -> None:
        """Return never; raises ServerDied when the process ends."""
        while self._process.poll() is None:
            await asyncio.sleep(0.2)
        raise self._death(f"ended with exit code {self._process.returncode}")

    def _death(self, what: str) -> ServerDied:
        log = self._spec.log_file.read_text(errors="replace").splitlines()
        last = "\n  ".join(line for line in log[-15:] if line.strip())
        return ServerDied(f"{self._spec.name} {what}; the end of {self._spec.log_file}:\n  {last}")


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        for path in ("/health", "/model_info"):  # the first asks for no token, so any server's would do
            async with session.get(url + path, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                if answer.status != 200:
                    return False
    except (aiohttp.ClientError, TimeoutError):
        return False
    return True
