"""Train on simulated servers whose hosts fail, with the real controller code: `benchmarks.controller --hosts N`.

Simulated are the clock, the servers, their actors, and a trainer that only waits. Real are admission, collector, pool,
router, HTTP client, supervisor, heartbeats and weight updates over `disk`. Every server is on a host of its own. Every
`every_s` seconds another host fails: its server's process dies, it is lost for good, or it is cut off for a moment.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from areal_like.backends.ray import heartbeat
from areal_like.backends.transports.disk.controller import DiskSync
from areal_like.core.errors import WorkerError
from areal_like.core.rollout import pool
from areal_like.core.rollout.admission import Admission
from areal_like.core.rollout.collector import Collector
from areal_like.core.rollout.pool import Sampling, ServerPool
from areal_like.core.rollout.single_turn import SingleTurn
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.types import Prompt, Reward
from areal_like.core.weights import SyncSpec, publish
from areal_like.run.supervisor import ServerSupervisor
from benchmarks.simulated_servers import MOST, RUNNING, Network, is_complete
from benchmarks.simulated_time import simulate

N_SAMPLES, PROMPT_TOKENS = 8, 32
QUEUED = 4  # times what servers run at once is in flight, so that a slow group keeps no server idle
ETA = QUEUED - 1
TRAIN_S, SAVE_S, UPDATE_S = 20.0, 5.0, 120.0
HOST_TIMEOUT_S, STALL_S = 10.0, 600.0
START_S, HOST_BACK_S, CUT_S = 60.0, 60.0, 5.0
FAILURES = ("process", "host", "cut")
WARM_UP = 2  # steps before the measurement, in which all samples began at once


@dataclass(frozen=True)
class Case:
    """So many hosts, so many simulated minutes, and the seconds between two failures (None: no failure)."""

    hosts: int
    minutes: float
    every_s: float | None = 60.0
    seed: int = 1


@dataclass(eq=False)
class Actors:
    """The actors of the servers; a lost host is replaced, and each start takes its time."""

    network: Network
    urls: list[str]
    role = "rollout"

    def only(self, rank: int) -> Actor:
        return Actor(self, rank)

    @asynccontextmanager
    async def replace(self, rank: int) -> AsyncIterator[Actor]:
        await asyncio.sleep(HOST_BACK_S)
        yield Actor(self, rank)


@dataclass(eq=False)
class Actor:
    """A group of one actor."""

    actors: Actors
    rank: int
    role = "rollout"

    @property
    def members(self) -> list[Any]:
        return [SimpleNamespace(rank=self.rank, host=self.actors.urls[self.rank], log_file=Path("log"))]

    async def call_one(self, _: int, method: str, *, phase: str, timeout: float | None = None) -> Any:
        if method == "start":
            await asyncio.sleep(START_S)
            self.actors.urls[self.rank] = self.actors.network.start()
            return self.actors.urls[self.rank]
        server = self.actors.network.server(self.actors.urls[self.rank])
        if method == "end":
            server.die()
        await asyncio.shield(server.died)
        raise WorkerError("rollout", self.rank, phase, "ended with exit code -9", Path("log"), "of the actor")

    def kill(self) -> None:
        """End nothing: a lost host has no actor."""


@dataclass
class Run:
    """A run's figures: times of steps, what was trained, and the seconds without a server, up to each step."""

    case: Case
    network: Network
    ended: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    incomplete: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    news: list[str] = field(default_factory=list)
    without_s: float = 0.0

    def note(self, trajectories: list[Any], groups: list[int]) -> None:
        """Note a trained batch."""
        responses = [trajectory.tokens[PROMPT_TOKENS:].tolist() for trajectory in trajectories]
        self.incomplete += sum(not is_complete(response) for response in responses)
        self.groups += groups
        self.tokens.append(sum(map(len, responses)))
        self.ended.append(asyncio.get_running_loop().time())
        self.lost_s.append(self.without_s)

    async def watch(self, servers: ServerPool) -> None:
        """Add up for how long servers of the layout were missing."""
        while True:
            await asyncio.sleep(1.0)
            working = sum(self.network.server(server.url).works for server in servers.serving)
            self.without_s += self.case.hosts - working

    async def fail(self, urls: list[str]) -> None:
        """Have a random host fail at intervals."""
        rng = Random(self.case.seed)
        while self.case.every_s:
            await asyncio.sleep(self.case.every_s)
            kind = FAILURES[self.failures.total() % len(FAILURES)]
            server = self.network.server(rng.choice(urls))
            self.failures[kind] += 1
            if kind == "process":
                server.die()
            else:
                server.reached.clear()
                if kind == "cut":
                    asyncio.get_running_loop().call_later(CUT_S, server.reached.set)

    def figures(self) -> dict[str, Any]:
        """Return throughput and losses after the warm-up."""
        seconds = self.ended[-1] - self.ended[WARM_UP - 1]
        return {
            "steps": len(self.ended) - WARM_UP,
            "simulated_s": round(seconds),
            "tokens_per_second": round(sum(self.tokens[WARM_UP:]) / seconds, 1),
            "failed_share": round((self.lost_s[-1] - self.lost_s[WARM_UP - 1]) / seconds / self.case.hosts, 5),
            "failures": dict(self.failures),
            "groups_trained_twice": len(self.groups) - len(set(self.groups)),
            "responses_with_lost_or_repeated_tokens": self.incomplete,
        }


async def no_reward(prompt: Prompt, responses: Any) -> list[Reward]:
    """Score nothing."""
    return [Reward(0.0)] * len(responses)


class Trainer:
    """A trainer that writes weights for some seconds."""

    async def save_hf(self, path: Path, *, phase: str, timeout_s: float) -> None:
        await asyncio.sleep(SAVE_S)


async def train(case: Case) -> dict[str, Any]:
    """Train for the simulated minutes and return the figures."""
    network = Network(Random(case.seed))
    run, urls = Run(case, network), [network.start() for _ in range(case.hosts)]
    size = case.hosts * RUNNING // N_SAMPLES  # groups of a step: what servers run at once
    prompts = [Prompt(row, [row % 1000] * PROMPT_TOKENS) for row in range(1000)]
    with (
        mock.patch.object(pool, "session", return_value=network),
        mock.patch.object(heartbeat, "answers", network.answers),
    ):
        async with (
            ServerPool(urls, "token", STALL_S, prefill_once=False, host_timeout_s=HOST_TIMEOUT_S) as servers,
            asyncio.TaskGroup() as tasks,
        ):
            collector = Collector(
                prompts=PromptStream(prompts, shuffle=True, seed=0),
                groups=1 << 40,
                workflow=SingleTurn(servers, no_reward, Sampling(MOST), N_SAMPLES),
                admission=Admission(size, ETA),
                max_groups=QUEUED * size,
                tasks=tasks,
            )
            spec = SyncSpec(UPDATE_S, Path("weights-of-a-simulation"), 1, "gloo", 64)
            sync = DiskSync(Trainer(), servers, spec)  # type: ignore[arg-type]
            actors = Actors(network, urls)
            keeps = ServerSupervisor(actors, servers, 100, 1, run.news.append, actors.replace, HOST_TIMEOUT_S)  # type: ignore[arg-type]
            helpers = [tasks.create_task(each) for each in (keeps.keep(), run.watch(servers), run.fail(urls))]
            await _steps(case, run, collector, lambda version: publish(sync, version, UPDATE_S))
            check_nothing_is_lost(run, collector, servers)
            for task in [*helpers, *collector._running.values()]:
                task.cancel()
    return run.figures()


async def _steps(case: Case, run: Run, collector: Collector, update: Callable[[int], Awaitable[None]]) -> None:
    version = 0
    await update(version)
    while asyncio.get_running_loop().time() < 60 * case.minutes:
        run.note(await collector.next_batch(), collector.taken)
        await asyncio.sleep(TRAIN_S)
        version += 1
        await update(version)
        collector.publish(version)


def check_nothing_is_lost(run: Run, collector: Collector, servers: ServerPool) -> None:
    """Check that every started group was trained once or still waits, and that all tokens are accounted for."""
    assert sorted([*run.groups, *collector.untrained]) == list(range(collector.started)), (
        "groups were lost or trained twice"
    )
    assert not run.incomplete, "tokens were lost or repeated"
    in_flight = servers.tokens_generated - servers.tokens.total()
    assert servers.tokens["delivered"] == servers.tokens.total(), servers.tokens
    assert in_flight >= 0 and servers.tokens["delivered"] >= sum(run.tokens), "tokens were lost or counted twice"


def compare(case: Case) -> dict[str, Any]:
    """Return the figures with and without failures, and the loss of throughput beside the share of failed servers."""
    without = simulate(train(Case(case.hosts, case.minutes, None, case.seed)))
    failing = simulate(train(case))
    loss = 1 - failing["tokens_per_second"] / without["tokens_per_second"]
    return {
        **asdict(case),
        "throughput_loss": round(loss, 5),
        "failed_share": failing["failed_share"],
        "loss_beyond_failed_share": round(loss - failing["failed_share"], 5),
        "with_failures": failing,
        "without_failures": without,
    }
