"""All servers of a run as one pool that holds one weight version."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from areal_like.rollout.sglang import KEEP_ALIVE_S
from areal_like.rollout.sglang.http import Deadline, Server, ServerError
from areal_like.types import FinishReason

PREFILL_ONLY = {"max_new_tokens": 0}


@dataclass(frozen=True)
class Sampling:
    """How to sample. Temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass
class Response:
    """What was generated for one prompt; lists have one entry per generated token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class ServerPool:
    """All servers of a run.

    Every request runs under one version: `interrupted` lets none through, brings those in flight back (partial
    responses are continued afterwards, prefix and all; without `partial_rollout` it waits for their ends), and only
    then may weights change.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        timeout_s: float,
        *,
        partial_rollout: bool = True,
        prefill_once: bool = True,
    ) -> None:
        # The client closes what is idle. Were it the server, it might do so just when a connection is used again.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S / 2)
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, connector=connector)
        self.servers = [Server(f"server {index}", url, self._session) for index, url in enumerate(urls)]
        self.version = -1
        self._timeout_s = timeout_s
        self._partial_rollout = partial_rollout
        self._prefill_once = prefill_once
        self._open = asyncio.Event()
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Response]:
        """Generate one response to each prompt, on one server as one request.

        Responses that a weight update interrupts are continued under the new version. `seeds` has one entry per prompt
        and counts on deterministic servers; these prefill every sample, so that it never depends on what their cache
        holds.
        """
        responses = [Response() for _ in prompts]
        pending = list(range(len(prompts)))
        while pending:
            async with self._admitted(len(pending)) as server:
                inputs = [[*prompts[i], *responses[i].tokens] for i in pending]
                if self._prefill_once and not seeds:
                    await self._prefill_shared(server, inputs)
                body = {
                    "input_ids": inputs,
                    "sampling_params": [
                        _sampling_params(sampling, len(responses[i].tokens), seeds[i] if seeds else None)
                        for i in pending
                    ],
                    "return_logprob": True,
                }
                outputs = await server.post("/generate", body, self._timeout_s)
                for i, output in zip(pending, outputs, strict=True):
                    self._extend(responses[i], output, sampling, server)
            pending = [i for i in pending if responses[i].finish_reason is None]
        return responses

    async def _prefill_shared(self, server: Server, inputs: Sequence[Sequence[int]]) -> None:
        """Have the server cache what several inputs are equal to: arriving together, each of them would prefill it."""
        shared = [tokens for tokens, n in Counter(map(tuple, inputs)).items() if n > 1]
        if shared:
            await server.post("/generate", {"input_ids": shared, "sampling_params": PREFILL_ONLY}, self._timeout_s)

    def _extend(self, response: Response, output: dict[str, Any], sampling: Sampling, server: Server) -> None:
        info = output["meta_info"]
        if info["weight_version"] != str(self.version):
            raise ServerError(f"{server.name} generated with weights {info['weight_version']}, not {self.version}")
        scored = info["output_token_logprobs"]
        response.tokens += [token for _, token, _ in scored]
        response.logprobs += [logprob for logprob, _, _ in scored]
        response.versions += [self.version] * len(scored)
        reason = info["finish_reason"]
        if reason.get("status_code"):
            raise ServerError(f"{server.name} gave up on a request: {reason.get('message')}")
        # An abort may reach a response in its last step, and SGLang calls an end token at the limit `length`.
        if scored and response.tokens[-1] in sampling.stop_token_ids:
            response.finish_reason = FinishReason.STOP
        elif len(response.tokens) >= sampling.max_new_tokens:
            response.finish_reason = FinishReason.LENGTH
        elif reason["type"] != "abort":
            response.finish_reason = FinishReason(reason["type"])

    @asynccontextmanager
    async def _admitted(self, sequences: int) -> AsyncIterator[Server]:
        while not self._open.is_set():
            await self._open.wait()
        server = min(self.servers, key=lambda server: server.in_flight)
        server.in_flight += sequences
        try:
            yield server
        finally:
            server.in_flight -= sequences
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def interrupted(self, version: int, deadline: Deadline) -> AsyncIterator[None]:
        """Hold all generation while the body brings every server to `version`.

        Raises ServerError if a server does not give back its requests in time, or does not say afterwards that it
        holds `version`.
        """
        self._open.clear()
        while busy := [server for server in self.servers if server.in_flight]:
            if deadline.passed:
                names = ", ".join(server.name for server in busy)
                raise ServerError(f"{names} did not give back the requests in flight within {deadline.seconds:g} s")
            if self._partial_rollout:
                await asyncio.gather(
                    *(server.post("/abort_request", {"abort_all": True}, deadline.left) for server in self.servers)
                )
            async with self._changed:
                try:
                    # A request that was on its way missed the abort: ask again.
                    await asyncio.wait_for(self._changed.wait_for(self._idle), timeout=0.2)
                except TimeoutError:
                    continue
        yield
        held = await asyncio.gather(*(server.get("/model_info", deadline.left) for server in self.servers))
        for server, info in zip(self.servers, held, strict=True):
            if info["weight_version"] != str(version):
                raise ServerError(f"{server.name} holds weights {info['weight_version']} after an update to {version}")
        self.version = version
        self._open.set()

    def _idle(self) -> bool:
        return not any(server.in_flight for server in self.servers)


def _sampling_params(sampling: Sampling, generated: int, seed: int | None) -> dict[str, Any]:
    params = {
        "max_new_tokens": sampling.max_new_tokens - generated,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    return params if seed is None else params | {"sampling_seed": seed}
