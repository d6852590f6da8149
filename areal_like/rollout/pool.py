"""All servers of a run as one pool that holds one weight version."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, Self

import aiohttp
import numpy as np

from areal_like.rollout.fleet import PAUSE_S, Fleet, Member
from areal_like.rollout.sglang import KEEP_ALIVE_S
from areal_like.rollout.sglang.http import Deadline, Server, ServerError, Unavailable, may_pass
from areal_like.rollout.sglang.versions import token_versions
from areal_like.types import FinishReason, Floats, Ints

type Requests = Literal["in_place", "recompute", "drain"]

PREFILL_ONLY = {"max_new_tokens": 0}
MOST_TRIES = 4  # of a request, in a row


@dataclass(frozen=True)
class Sampling:
    """How to sample. Temperature 0 is greedy.

    A response ends with a token of `stop_token_ids` or, unless `ignore_eos`, the model's end token.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(eq=False)
class Response:
    """What was generated for one prompt; arrays are `[generated tokens]`."""

    tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    finish_reason: FinishReason | None = None


class ServerPool:
    """All servers of a run.

    Weights change only while `interrupted`. What happens to running requests then is what `requests` says
    (`weight_update.requests`); in any case every token has the version that made it. `timeout_s` is how long a server
    may do nothing while it has requests.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        timeout_s: float,
        *,
        requests: Requests = "in_place",
        prefill_once: bool = True,
    ) -> None:
        # The client closes what is idle. Were it the server, it might do so just when a connection is used again.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S / 2)
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, connector=connector)
        self._numbers = itertools.count()
        self._fleet = Fleet(timeout_s)
        self._requests = requests
        self._prefill_once = prefill_once
        self.version = -1
        self.pause_s = 0.0  # for how long the last update held the servers
        for url in urls:
            self.join(url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def servers(self) -> list[Server]:
        """Everybody who has to have the next weights."""
        return self._fleet.servers

    def join(self, url: str) -> Server:
        """Add a server, which is sent requests once the next version has been brought to it."""
        server = Server(f"server {next(self._numbers)}", url, self._session)
        self._fleet.join(server)
        return server

    def leave(self, server: Server) -> None:
        """Take a server out; its requests go on elsewhere, from what was generated before they came to it."""
        self._fleet.leave(server)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        priority: int = 0,
    ) -> list[Response]:
        """Generate one response to each prompt, on one server as one request; the smallest `priority` goes first.

        Responses whose server fails are continued on another one or later; raises ServerError after MOST_TRIES in a
        row. `seeds` has one entry per prompt and counts on deterministic servers; these prefill every sample, so that
        it never depends on what their cache holds.
        """
        responses = [Response() for _ in prompts]
        causes: list[str] = []
        while pending := [i for i, response in enumerate(responses) if response.finish_reason is None]:
            inputs = [np.concatenate([np.array(prompts[i], np.int32), responses[i].tokens]) for i in pending]
            params = [
                _sampling_params(sampling, len(responses[i].tokens), seeds[i] if seeds else None) for i in pending
            ]
            body = {"input_ids": inputs, "sampling_params": params, "return_logprob": True}
            try:
                async with self._fleet.place(len(pending), priority) as member:
                    if self._prefill_once and not seeds:
                        await self._prefill_shared(member, inputs)
                    sent = self.version
                    outputs = await self._fleet.ask(member, body)
                    self._extend([responses[i] for i in pending], outputs, sampling, member.server, sent)
                causes.clear()
            except Unavailable as error:
                causes.append(str(error))
                if len(causes) == MOST_TRIES:
                    raise ServerError(f"a request failed {MOST_TRIES} times:\n  " + "\n  ".join(causes)) from error
        return responses

    async def sample(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        seed: int | None = None,
        priority: int = 0,
        session: Hashable | None = None,
    ) -> Response:
        """Generate one response; requests of one `session` go to one server while that lives, which keeps their prefix.

        Raises as `generate` does.
        """
        (response,) = await self.generate([tokens], sampling, None if seed is None else [seed], priority)
        return response

    async def _prefill_shared(self, member: Member, inputs: Sequence[Ints]) -> None:
        """Have the server cache what several inputs are equal to: arriving together, each of them would prefill it."""
        count = Counter(tokens.tobytes() for tokens in inputs)
        shared = [np.frombuffer(tokens, np.int32) for tokens, n in count.items() if n > 1]
        if shared:
            await self._fleet.ask(member, {"input_ids": shared, "sampling_params": PREFILL_ONLY})

    def _extend(
        self, responses: Sequence[Response], outputs: Any, sampling: Sampling, server: Server, sent: int
    ) -> None:
        """Add the outputs of a request that was sent under version `sent`; raises Unavailable where one is unusable."""
        if not isinstance(outputs, list) or len(outputs) != len(responses):
            raise Unavailable(f"{server.name} did not answer with {len(responses)} outputs: {str(outputs)[:200]}")
        failure: ServerError | None = None
        for response, output in zip(responses, outputs, strict=True):
            try:
                info = output["meta_info"]
                if status := info["finish_reason"].get("status_code"):
                    kind = Unavailable if may_pass(int(status)) else ServerError
                    failure = kind(f"{server.name} gave up on a request: {info['finish_reason'].get('message')}")
                    continue
                _append(response, info, sampling, (sent, self.version))
            except WrongVersion as error:
                raise ServerError(f"{server.name} {error}") from error
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                failure = Unavailable(f"{server.name} gave an answer that cannot be used: {error!r}")
        if failure:
            raise failure

    @asynccontextmanager
    async def interrupted(self, version: int, deadline: Deadline) -> AsyncIterator[None]:
        """Hold all generation while the body brings every server to `version`; those who join are in from then on.

        Raises ServerError if a server does not pause or, with `drain`, give back its requests in time, or does not say
        afterwards that it holds `version`.
        """
        if self._requests == "drain":
            await self._fleet.close(deadline)
        started = time.monotonic()
        with self._fleet.excused():
            mode = "retract" if self._requests == "recompute" else "in_place"
            await self._tell("/pause_generation", {"mode": mode}, deadline)
            yield
            await asyncio.gather(*(_acknowledge(server, version, deadline) for server in self.servers))
            self.version = version
            await self._tell("/continue_generation", {"torch_empty_cache": False}, deadline)
        self.pause_s = time.monotonic() - started
        await self._fleet.open(deadline)

    async def _tell(self, path: str, body: dict[str, Any], deadline: Deadline) -> None:
        await asyncio.gather(*(server.post(path, body, deadline.left) for server in self.servers))


async def _acknowledge(server: Server, version: int, deadline: Deadline) -> None:
    """Have a server say that it holds `version`; raises ServerError where it holds another."""
    while True:
        try:
            held = (await server.get("/model_info", deadline.left))["weight_version"]
            if held != str(version):
                raise ServerError(f"{server.name} holds weights {held} after an update to {version}")
            return
        except Unavailable:
            if deadline.left <= PAUSE_S:
                raise
        await asyncio.sleep(PAUSE_S)


class WrongVersion(Exception):
    """A server generated with weights that it should not have had."""


def _append(response: Response, info: Mapping[str, Any], sampling: Sampling, versions: tuple[int, int]) -> None:
    """Add what SGLang generated, `info["output_token_logprobs"]`: [log-prob, token, text or null] for each token.

    `versions` are the first and the last that may have made it. Raises WrongVersion, and others where the answer is
    not in SGLang's form.
    """
    scored = info["output_token_logprobs"]
    logprobs, tokens = (
        np.fromiter(map(itemgetter(place), scored), dtype, len(scored)) for place, dtype in enumerate(("f4", "i4"))
    )
    made_by, (first, last) = token_versions(info, len(tokens)), versions
    if len(made_by) and not (first <= made_by[0] and made_by[-1] <= last and (np.diff(made_by) >= 0).all()):
        made = ", ".join(map(str, dict.fromkeys(made_by.tolist())))
        raise WrongVersion(f"generated with weights {made}, where {first} to {last} were possible")
    response.tokens = np.concatenate([response.tokens, tokens])
    response.logprobs = np.concatenate([response.logprobs, logprobs])
    response.versions = np.concatenate([response.versions, made_by])
    reason = info["finish_reason"]["type"]
    # An abort may reach a response in its last step, and SGLang calls an end token at the limit `length`.
    if len(tokens) and tokens[-1] in sampling.stop_token_ids:
        response.finish_reason = FinishReason.STOP
    elif len(response.tokens) >= sampling.max_new_tokens:
        response.finish_reason = FinishReason.LENGTH
    elif reason != "abort":
        response.finish_reason = FinishReason(reason)


def _sampling_params(sampling: Sampling, generated: int, seed: int | None) -> dict[str, Any]:
    params = {
        "max_new_tokens": sampling.max_new_tokens - generated,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    return params if seed is None else params | {"sampling_seed": seed}
