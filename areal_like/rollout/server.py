"""One SGLang server: its command line, and the Ray actor that starts it and notices its end."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import numpy as np

from areal_like.cluster.lifetime import reserve_port, spawn
from areal_like.config.schema import RunConfig
from areal_like.rollout import LAUNCHER, TOKEN_VARIABLE

if TYPE_CHECKING:
    from allocation import ParallelSizes

MOST_SEQUENCES_ON_CPU = 1024  # that the KV cache has room for; more would wait anyway


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


def server_arguments(
    config: RunConfig, model: Path, sizes: ParallelSizes, device: str, index: int = 0
) -> tuple[str, ...]:
    """SGLang's arguments for server `index` of the run; each draws its own random numbers."""
    sglang, context_length = config.sglang, config.context_length
    options: dict[str, object] = {
        "model-path": model,
        "dtype": config.actor.dtype,
        "context-length": context_length,
        "tp-size": sizes.tp,
        "pp-size": sizes.pp,
        "ep-size": sizes.ep,
        "random-seed": np.random.SeedSequence([config.seed, index]).generate_state(1)[0],
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "grammar-backend": "none",
        "sampling-backend": "pytorch",
        "max-running-requests": sglang.max_running_requests,
        "attention-backend": sglang.attention_backend,
        "enable-deterministic-inference": sglang.deterministic,
    }
    if device == "cpu":
        in_flight = (
            config.train_dataset.batch_size * config.gconfig.n_samples * (1 + config.rollout.max_head_offpolicyness)
        )
        options |= {
            "device": "cpu",
            "attention-backend": "torch_native",
            "disable-cuda-graph": True,
            "disable-overlap-schedule": True,  # it hides the scheduler's work behind a GPU; here both take the same core
            "sleep-on-idle": True,  # else the scheduler takes a whole core from the trainer while it waits
            "max-total-tokens": context_length * min(in_flight, MOST_SEQUENCES_ON_CPU),
        }
    else:
        options |= {"mem-fraction-static": sglang.mem_fraction_static}
    options |= {name.replace("_", "-"): value for name, value in sglang.extra_args.items()}
    flags: list[str] = []
    for name, value in options.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is not None and value is not False:
            flags += [f"--{name}", str(value)]
    return tuple(flags)


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
