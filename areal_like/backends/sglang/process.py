"""One SGLang server: its command line, and the Ray actor that starts it and notices its end."""

import asyncio
import os
import sys
import time

import aiohttp

from areal_like.backends.ray.lifetime import GLOO_VARIABLE, local_interface, spawn
from areal_like.backends.ray.placement import url as url_of
from areal_like.backends.ray.ray_cluster import LOOPBACK
from areal_like.backends.sglang import LAUNCHER, TOKEN_VARIABLE, WEIGHTS_INTERFACE_VARIABLE
from areal_like.backends.sglang.server import CLASSIFY, GENERATE
from areal_like.core.rollout.server import ServerSpec
from areal_like.runtime.logs import shorten_log
from areal_like.runtime.ports import reserve_port

POLL_S = 0.2
ANSWER_S = 30.0  # that a server has for its first token; then it is asked again
ONE_TOKEN = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
# lines of SGLang's log during the start, in order
STAGES = {
    "server_args=": "read its arguments",
    "Init torch distributed ends": "brought its ranks together",
    "Load weight begin": "began to load the weights",
    "Load weight end": "loaded the weights",
    "Memory pool end": "allocated the KV cache",
    "Capture cuda graph begin": "began to capture CUDA graphs",
    "Capture cuda graph end": "captured CUDA graphs",
    "Application startup complete": "opened its port",
}


class ServerDied(RuntimeError):
    """A server process ended or did not become ready; the message holds its last words."""


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
            what = f"port {spec.port}" if spec.port else "any port"
            raise ServerDied(f"{spec.name} cannot listen on {what} of {self._host}: {error.strerror}") from error
        with reserved:  # a port that was merely free would be another's by the time that SGLang listens
            return await self._serve(reserved.getsockname()[1])

    async def _serve(self, port: int) -> str:
        spec = self._spec
        command = [sys.executable, "-m", LAUNCHER, *spec.arguments, "--host", self._host, "--port", str(port)]
        interface = local_interface(self._host)  # where other hosts reach this one, unless the user has set it
        sockets = {
            GLOO_VARIABLE: local_interface(LOOPBACK),  # of SGLang's own groups: a server is on one host
            WEIGHTS_INTERFACE_VARIABLE: os.environ.get(GLOO_VARIABLE, interface),
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", interface),
        }
        self._process = spawn(command, env={TOKEN_VARIABLE: spec.token, **sockets}, log_file=spec.log_file)
        url = url_of(self._host, port)
        deadline = time.monotonic() + spec.startup_timeout_s
        probe = url + (CLASSIFY if spec.classifies else GENERATE)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {spec.token}"}) as session:
            while not await _answers(session, probe, deadline - time.monotonic()):
                if self._process.poll() is not None:
                    raise self._death("ended before it was ready")
                if time.monotonic() > deadline:
                    await self.end()
                    stage = last_stage(spec.log_file.read_text(errors="replace"))
                    raise self._death(
                        f"was not ready within {spec.startup_timeout_s:g} s (rollout.startup_timeout_s); it last {stage}"
                    )
                await asyncio.sleep(POLL_S)
        return url

    async def watch(self) -> None:
        """Return never; raises ServerDied when the process ends."""
        while self._process.poll() is None:
            await asyncio.sleep(POLL_S)
            shorten_log(self._spec.log_file)
        raise self._death(f"ended with exit code {self._process.returncode}")

    async def end(self) -> None:
        """Kill the server; its children notice and go with it."""
        self._process.kill()

    def _death(self, what: str) -> ServerDied:
        log = self._spec.log_file.read_text(errors="replace").splitlines()
        last = "\n  ".join(line for line in log[-15:] if line.strip())
        return ServerDied(f"{self._spec.name} {what}\n  the end of {self._spec.log_file}:\n  {last}")


async def _answers(session: aiohttp.ClientSession, url: str, left_s: float) -> bool:
    """Return whether this server, which knows the token, computes. SGLang's /health_generate takes a second."""
    limit = aiohttp.ClientTimeout(total=min(max(left_s, POLL_S), ANSWER_S))
    try:
        async with session.post(url, json=ONE_TOKEN, timeout=limit) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def last_stage(log: str) -> str:
    """Return the last of the STAGES in a log."""
    return next((what for words, what in reversed(STAGES.items()) if words in log), "started its process")
