"""All servers of a run as one pool that holds one weight version."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext, suppress
from typing import Literal, Self

import numpy as np

from areal_like.core.errors import Fault, ServerError
from areal_like.core.events import note, now, span, turn
from areal_like.core.rollout.backends import DEFAULT, find_backend
from areal_like.core.rollout.dispatch import PrefixAffinity
from areal_like.core.rollout.http import AFTERMATH_S, Deadline, Unavailable, session
from areal_like.core.rollout.router import PAUSE_S, Router
from areal_like.core.rollout.sample import OnTokens, Response, Sample, Sampling
from areal_like.core.rollout.server import Server
from areal_like.core.rollout.turns import Turns
from areal_like.core.types import Images, Ints

__all__ = ["Requests", "Response", "Sampling", "ServerPool"]

type Check = Callable[[Sequence[Server], Deadline], AbstractAsyncContextManager[None]]
type Requests = Literal["in_place", "recompute", "drain"]

MOST_TRIES = 4  # of a sample, in a row
LONG_PROMPT = 64  # tokens; to wait for another's prefill of less costs more than to do it again
PAUSE_SHARE = 1 / 3  # of an update's time: the rest is for sending the weights to the others once more
HANGS_S = 0.5  # that a server has to have had for an update before it is said to hang
SOON_S = 0.25  # a pass takes less
POLL_S = 0.1
ASKED = 8  # servers that are asked something in one turn of the event loop, each some 200 us of work
GROUPS = 2  # that start in one turn of the event loop
MOST_SESSIONS = 100_000  # that are remembered


class ServerPool:
    """All servers of a run.

    Weights change only within `interrupt`. `requests` (`weight_update.requests`) is the policy for running
    requests; in any case every token has the version that made it. `timeout_s` is how long a server may do nothing
    while it has requests.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        timeout_s: float,
        *,
        requests: Requests = "in_place",
        prefill_once: bool = True,
        host_timeout_s: float = 0.0,
        backend: str = DEFAULT,
    ) -> None:
        self._connect = find_backend(backend).connect
        self._session = session(token)
        self._host_timeout_s = host_timeout_s
        self._numbers = itertools.count()
        self._router = Router(timeout_s)
        self._requests = requests
        self._prefill_once = prefill_once
        self._sessions: dict[Hashable, PrefixAffinity] = {}
        self._start = Turns(GROUPS)
        self._asked = Turns(ASKED)
        self._faults: Counter[Fault] = Counter()
        self.tokens: Counter[str] = Counter()  # of finished samples, by outcome: delivered, cancelled, failed, ...
        self._held: Sequence[Server] = ()
        self.checking: Check = lambda servers, deadline: nullcontext()  # contexts of each update
        self._holding = ExitStack()
        self.pause_s = 0.0  # for how long requests last stood still
        self._paused_since: float | None = None
        for rank, url in enumerate(urls):
            self.join(url, rank)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._router.stop()
        await self._session.close()

    @property
    def version(self) -> int:
        """Version of the weights on the servers; -1 before the first."""
        return self._router.version

    @property
    def tokens_generated(self) -> int:
        """All tokens that servers have generated: in `tokens`, and in samples in flight."""
        return self._router.generated

    def reset_ledger(self) -> None:
        """Count tokens from here on, where no sample is on its way: those so far belong to an earlier trainer."""
        self.tokens.clear()
        self._router.generated = 0

    def statistics(self) -> dict[str, float]:
        """Return how long requests last stood still; since the last call: how long they waited and ran, and faults."""
        waited, ran, faults, loads = self._router.waited or [0.0], self._router.ran, self._faults, self._router.loads
        self._router.waited, self._router.ran, self._faults = [], [], Counter()
        return {
            "rollout/pause_seconds": self.pause_s,
            "rollout/queue_seconds_mean": float(np.mean(waited)),
            "rollout/queue_seconds_max": max(waited),
            "rollout/longest_seconds": max(ran, default=0.0),
            "rollout/servers": float(len(self.serving)),
            **({"rollout/kv_use": float(np.mean([load.kv_use for load in loads]))} if loads else {}),
            **({"rollout/running": float(np.mean([load.running for load in loads]))} if loads else {}),
            **{f"server_faults/{fault}": float(times) for fault, times in faults.items()},
        }

    def load(self) -> dict[str, float]:
        """Return the share of idle servers now, and for how long requests have waited and run since `statistics`."""
        router = self._router
        return {
            "idle/servers": 1 - len(router.busy) / max(1, len(router.servers)),
            "rollout/queue_seconds_mean": float(np.mean(router.waited or [0.0])),
            "rollout/longest_seconds": max(router.oldest_s, max(router.ran, default=0.0)),
        }

    @property
    def servers(self) -> list[Server]:
        """Servers that must receive the next weights."""
        return self._router.servers

    def join(self, url: str, rank: int) -> Server:
        """Add the server at place `rank` of the layout, which receives requests from the next update on."""
        name = f"server {next(self._numbers)}"
        server = self._connect(name, url, self._session, rank, self._asked, host_timeout_s=self._host_timeout_s)
        self._router.join(server)
        return server

    def leave(self, server: Server, why: str = "left the run") -> None:
        """Remove a server; its requests continue on other servers from the tokens it has generated."""
        self._router.leave(server, why)

    @property
    def serving(self) -> list[Server]:
        """Servers that hold the current version."""
        return self._router.serving

    def on_hang(self, tell: Callable[[Server], object]) -> None:
        """Register a function that is called with a server that does nothing although it has requests."""
        self._router.hung = tell

    async def generate(
        self,
        prompts: Sequence[Sequence[int] | Ints],
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        priority: int = 0,
        images: Images = (),
    ) -> list[Response]:
        """Generate one response to each prompt; they belong together, but each is a sample of its own.

        All of them have the same `images`.

        Equal prompts are prefilled once: the others follow when the first has begun. With `seeds`, one for each, which
        count on deterministic servers, they never do, so that a sample does not depend on the cache. Raises
        as `sample` does.
        """
        await self._start()
        first: dict[bytes, tuple[Sample, PrefixAffinity]] = {}

        async def one(place: int) -> Response:
            awaited = self._prefill_once and not seeds and len(prompts[place]) >= LONG_PROMPT
            seed = seeds[place] if seeds else None
            sample = Sample(np.asarray(prompts[place], np.int32), sampling, seed, awaited, images=images)
            leader, affinity = first.setdefault(sample.prompt.tobytes(), (sample, PrefixAffinity()))
            if leader is not sample and awaited:
                await leader.begun.wait()
            return await self._finish(sample, priority, affinity)

        tasks = [asyncio.ensure_future(one(place)) for place in range(len(prompts))]
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            self.cancel(
                [task.result() for task in tasks if task.done() and not task.cancelled() and not task.exception()]
            )
            raise
        finally:
            for task in tasks:
                task.cancel()

    def cancel(self, responses: Sequence[Response]) -> None:
        """Count delivered responses as cancelled, since they are no longer needed."""
        self.set_aside("cancelled", sum(len(response.tokens) for response in responses))

    def set_aside(self, reason: Literal["cancelled", "orphaned", "unused"], tokens: int) -> None:
        """Count tokens of delivered responses that are in no trajectory."""
        self.tokens["delivered"] -= tokens
        self.tokens[reason] += tokens

    async def sample(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        seed: int | None = None,
        priority: int = 0,
        session: Hashable | None = None,
        inputs_from: int = 0,
        on_tokens: OnTokens | None = None,
        images: Images = (),
    ) -> Response:
        """Generate one response; requests of one `session` go to one server until it fails, which keeps their prefix.

        The smallest `priority` goes first. Columns of inputs start at the token `inputs_from`: the caller
        knows the rows before it. `on_tokens` is called with tokens as they arrive. A failed request is continued on
        another server or later; raises ServerError after MOST_TRIES in a row that brought no token.
        """
        affinity = None
        if session is not None:
            affinity = self._sessions.pop(session, None) or PrefixAffinity(bound=True)
            self._sessions[session] = affinity  # the last is the latest
            if len(self._sessions) > MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        sample = Sample(
            np.array(tokens, np.int32), sampling, seed, inputs_from=inputs_from, on_tokens=on_tokens, images=images
        )
        return await self._finish(sample, priority, affinity)

    def end_session(self, session: Hashable) -> None:
        """Forget the server of a session without further requests."""
        self._sessions.pop(session, None)

    async def _finish(self, sample: Sample, priority: int, affinity: PrefixAffinity | None) -> Response:
        causes: list[str] = []
        failed_at = 0.0
        outcome = "cancelled"
        try:
            while sample.finish_reason is None:
                before = sample.length
                try:
                    await self._router.generate(sample, priority, affinity)
                except ServerError as error:
                    self._faults[error.fault] += 1
                    if not isinstance(error, Unavailable):
                        raise
                    failed_at = failed_at or now()
                    causes = [*causes, str(error)] if sample.length == before else [str(error)]
                    if len(causes) == MOST_TRIES:
                        told = "\n  ".join(causes)
                        raise ServerError(f"a request failed {MOST_TRIES} times:\n  {told}", error.fault) from error
            if failed_at:
                note("requests", "continued", failed_at)
            outcome = "delivered"
            return sample.response
        except ServerError:
            outcome = "failed"
            raise
        finally:
            sample.begun.set()
            self.tokens[outcome] += sample.length

    @asynccontextmanager
    async def interrupt(
        self, version: int, deadline: Deadline, servers: Sequence[Server] | None = None
    ) -> AsyncIterator[Sequence[Server]]:
        """Hold all generation while the body brings `servers`, by default all, to `version`; gives them.

        New servers receive samples from then on. Raises ServerError if a server does not pause or, with
        `drain`, give back its requests in time, or does not say afterwards that it holds `version`.
        """
        servers = self.servers if servers is None else servers
        async with self._without_hung(servers, deadline):
            if self._requests == "drain":
                await self._router.close(deadline)
            with self._router.excuse(), span("weights", "pause", version=version):
                await self._pause([server for server in servers if server not in self._held], deadline)
                async with self.checking(servers, deadline):
                    yield servers
                self._router.version = version
                await self._continue([server for server in servers if server not in self._held], deadline)
        await asyncio.gather(*(self._acknowledge(server, version, deadline) for server in servers))
        await self._router.open(servers, deadline)

    async def hold(self, deadline: Deadline) -> None:
        """Pause all servers until `release_hold`, and release their GPUs' memory; updates may come then.

        The KV cache of running requests waits in host memory, or is computed again afterwards if `requests` is
        `recompute`. Raises ServerError.
        """
        self._held, self._router.on_hold = self.servers, True
        self._holding.enter_context(self._router.excuse())
        await self._pause(self._held, deadline)
        await self._on_each(self._held, lambda server: server.release_memory(deadline.left))
        for server in self._held:
            turn(server.name, None)

    async def take_weights_back(self, deadline: Deadline) -> None:
        """Allocate the weights' memory of paused servers again; it is empty until an update."""
        await self._on_each(self._held, lambda server: server.resume_memory("weights", deadline.left))

    async def release_hold(self, deadline: Deadline) -> None:
        """Allocate the rest of the memory of paused servers, which were updated since, and resume."""
        held, self._held = [server for server in self._held if server in self.servers], ()
        await self._on_each(held, lambda server: server.resume_memory("kv_cache", deadline.left))
        await self._continue(held, deadline)
        for server in self._router.busy:
            turn(server.name, "generating")
        self._router.on_hold = False
        self._holding.close()

    async def _pause(self, servers: Sequence[Server], deadline: Deadline) -> None:
        retract, limit = self._requests == "recompute", Deadline(deadline.left * PAUSE_SHARE)
        if self._paused_since is None:
            self._paused_since = time.monotonic()
        await self._on_each(servers, lambda server: server.pause(limit.left, retract=retract))

    @asynccontextmanager
    async def _without_hung(self, servers: Sequence[Server], deadline: Deadline) -> AsyncIterator[None]:
        """End the servers that hang while the body runs, if one of them is late.

        One that loads for too long has answered before. To answer takes a server some milliseconds, which are not a
        part of the body as long as it does so soon.
        """
        silent, limit_s = set(servers), deadline.left

        async def ask(server: Server) -> None:
            with suppress(ServerError):
                await server.most_running(limit_s)  # which SGLang's scheduler reports, unlike that it pauses
                silent.discard(server)

        asking = [asyncio.create_task(ask(server)) for server in servers]
        try:
            if asking:
                await asyncio.wait(asking, timeout=min(SOON_S, limit_s / 10))
            yield
        except Unavailable as error:
            if error.fault == "late" and limit_s >= HANGS_S:
                await asyncio.gather(*map(self._end, silent))
            raise
        finally:
            for task in asking:
                task.cancel()

    async def end_unresponsive(self, servers: Sequence[Server]) -> None:
        """End idle servers whose schedulers do not answer; raise ServerError if there are any.

        In a broadcast one of them makes all others late, whose limits may fire first.
        """

        async def ask(server: Server) -> None:
            with suppress(ServerError):
                await server.most_running(AFTERMATH_S)
                responsive.add(server)

        responsive: set[Server] = set()
        await asyncio.gather(*map(ask, servers))
        if hung := [server for server in servers if server in self.servers and server not in responsive]:
            await asyncio.gather(*map(self._end, hung))
            names = [server.name for server in hung]
            raise ServerError(f"{', '.join(names)}: the scheduler does not answer", "late", names)

    async def _end(self, server: Server) -> None:
        """Report a hung server to the supervisor, and wait until it has left, if it does."""
        self._router.hung(server)
        leaving = Deadline(2 * AFTERMATH_S)
        while server in self.servers and not leaving.passed:
            await asyncio.sleep(POLL_S)

    async def _continue(self, servers: Sequence[Server], deadline: Deadline) -> None:
        await self._on_each(servers, lambda server: server.resume(deadline.left))
        if not self._held and self._paused_since is not None:
            self.pause_s, self._paused_since = time.monotonic() - self._paused_since, None

    async def _acknowledge(self, server: Server, version: int, deadline: Deadline) -> None:
        """Check that a server holds `version`; raise ServerError if it holds another."""
        while True:
            try:
                held = await server.weight_version(deadline.left)
                if held != str(version):
                    message = f"{server.name} holds weights {held} after an update to {version}"
                    raise ServerError(message, "wrong_version", [server.name])
                return
            except Unavailable:
                if deadline.left <= PAUSE_S or server not in self.servers:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _on_each(self, servers: Sequence[Server], request: Callable[[Server], Awaitable[None]]) -> None:
        """Send a request to each server; ignore the failure of a server that has left meanwhile."""

        async def send(server: Server) -> None:
            try:
                await request(server)
            except ServerError:
                if server in self.servers:
                    raise

        await asyncio.gather(*map(send, servers))
