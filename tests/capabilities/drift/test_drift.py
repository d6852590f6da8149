"""The drift alarm among servers and a trainer that compute as a test tells them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from running import CONFIG

from areal_like.backends.sglang.checksums import compare_noted, note
from areal_like.backends.transports.checksum import checksum
from areal_like.capabilities.drift.alarm import PROBE_S, DriftAlarm, LogprobDrift, choose_probe
from areal_like.capabilities.drift.backoff import LONGEST
from areal_like.capabilities.drift.hook import DriftHook
from areal_like.capabilities.drift.schedule import FIRST, SHARE, Schedule
from areal_like.capabilities.router_replay.columns import ROUTES, Routes, RouteShape, unknown_expert
from areal_like.core.algorithms.batch import batch_of
from areal_like.core.columns import Ragged
from areal_like.core.config.load import load
from areal_like.core.errors import LogprobMismatch, ServerError
from areal_like.core.loop import loop
from areal_like.core.loop.logprob_check import check_logprobs
from areal_like.core.loop.loop import Parts
from areal_like.core.loop.policies import Policy
from areal_like.core.rollout import http
from areal_like.core.rollout.http import Deadline
from areal_like.core.sampling_masks import KEPT
from areal_like.core.types import Batch, FinishReason, Images, Ints, Trajectory

pytestmark = pytest.mark.covers("drift alarm")

LIMIT = 0.05
PROMPT, RESPONSE = 6, 40

type Fault = Callable[[np.ndarray, str | None], np.ndarray]
"""What a server adds to the right log-probs of a sequence, by position and cache."""


def right(tokens: Ints) -> np.ndarray:
    return -1 - 0.1 * (tokens % 7)


SHAPE = RouteShape(layers=4, with_experts=(1, 2, 3), chosen=2, experts=8)
OTHERWISE = 4.0  # nats that another expert changes the next log-prob by


def usual_routes(tokens: Ints) -> Routes:
    first = (tokens[:, None] + np.arange(len(SHAPE.with_experts))) % SHAPE.experts
    return np.stack([first, (first + 3) % SHAPE.experts], axis=2).astype(np.uint8)


def flipped(tokens: Ints, flips: dict[int, int]) -> Routes:
    """The usual experts, and others for some tokens, each in one layer."""
    routes = usual_routes(tokens)
    for token, layer in [item for item in flips.items() if item[0] < len(tokens)]:
        routes[token, layer, 0] = (routes[token, layer, 0] + 1) % SHAPE.experts
    return routes


def changed_by(routes: Routes, tokens: Ints) -> np.ndarray:
    """What experts that are not the usual ones change log-probs by; those that are unknown are."""
    routes = np.where(routes == unknown_expert(routes.dtype), usual_routes(tokens), routes)
    unusual = (np.sort(routes, axis=2) != np.sort(usual_routes(tokens), axis=2)).any(axis=(1, 2))
    return OTHERWISE * np.concatenate([[0], unusual[:-1]])


class FakeServer:
    """A server that scores with a fault; weights that differ are healed when they are sent once more.

    It chooses other experts at `flips`, by the token's place, and returns those at `returned`.
    """

    def __init__(self, name: str, fault: Fault | None = None, wrong: str = "") -> None:
        self.name, self.fault, self.wrong = name, fault, wrong
        self.flips: dict[int, int] = {}
        self.returned: dict[int, int] | None = None
        self.fails = False
        self.noted = ""

    async def token_scores(
        self,
        tokens: Ints,
        timeout_s: float,
        *,
        start: int,
        cache: str | None,
        columns: Mapping[str, RouteShape],
        images: Images = (),
        adapter: str | None = None,
    ) -> tuple[np.ndarray, Routes | None]:
        if self.fails:
            raise ServerError(f"{self.name} is busy", "late", [self.name])
        scored = right(tokens) + (self.fault(np.arange(len(tokens)), cache) if self.fault else 0)
        scored += changed_by(flipped(tokens, self.flips), tokens)
        returned = self.flips if self.returned is None else self.returned
        routes = flipped(tokens, returned)[..., ::-1]  # their order means nothing
        return np.where(np.arange(len(tokens)) > start, scored, 0).astype(np.float32), {
            ROUTES: routes
        } if columns else {}

    async def note_weights(self, timeout_s: float) -> None:
        self.noted = self.wrong

    async def compare_noted(self, timeout_s: float) -> None:
        if "late" in self.wrong:
            raise ServerError(f"{self.name} did not answer within 30 s", "late", [self.name])
        if self.noted:
            raise ServerError(f"{self.name} refused: rank 0 failed to load: ValueError: {self.noted}", "refused")

    async def watch_checksums(self, timeout_s: float) -> None: ...

    async def compare_checksums(self, expected: str, timeout_s: float) -> None:
        if "stalls" in self.wrong:
            raise ServerError(f"{self.name} did not answer within 30 s", "late", [self.name])
        if "transport" in self.wrong:
            raise ServerError(f"{self.name} refused: ValueError: {self.wrong}", "refused", [self.name])


class Scene:
    """A run of two servers, whose log is `said`; `calls` counts the trainer's passes."""

    def __init__(
        self,
        servers: Sequence[FakeServer],
        *settings: str,
        experts: bool = False,
        routes: RouteShape | None = None,
        adapter: str | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.said: list[str] = []
        self.passes: list[Batch] = []
        self.pool = SimpleNamespace(serving=servers, servers=servers, checking=lambda *_: nullcontext())
        self.sent: list[int] = []
        config = load(CONFIG, [f"rollout.max_logprob_diff={LIMIT}", *settings]).config
        given = (config, self, self.pool, self, self.said.append)
        self.alarm = DriftAlarm(
            *cast(Any, given),
            has_experts=experts,
            columns={ROUTES: routes} if routes else {},
            adapter=adapter,
            clock=clock or time.monotonic,
        )
        if clock is None:
            self.alarm._schedule = Schedule(share=1.0)  # every step

    async def log_probs(self, batch: Batch, temperature: float) -> np.ndarray:
        assert temperature == 1.0
        self.passes.append(batch)
        replayed = changed_by(batch.fields[ROUTES], batch.tokens) if ROUTES in batch.fields else 0
        return ((right(batch.tokens) + replayed) * batch.fields["loss_mask"]).astype(np.float32)

    async def checksums(self, *, timeout_s: float) -> dict[str, int]:
        return {}

    async def send(self, version: int, deadline: Deadline) -> None:
        self.sent.append(version)
        async with self.pool.checking(self.pool.servers, deadline):
            pass

    async def step(self, version: int, figure: float | None = None) -> dict[str, float]:
        await self.alarm.score(responses())
        measured = await self.alarm.compare(version)
        await self.alarm.observe(version, figure)
        return measured


def responses(group: int = 3) -> list[Trajectory]:
    """Four responses of one group to one prompt, and one of another."""
    rng = np.random.default_rng(0)
    made = []
    for number, (of, length) in enumerate([*((group, RESPONSE) for _ in range(4)), (group + 1, 5)]):
        prompt = np.arange(PROMPT) + of
        tokens = np.concatenate([prompt, rng.integers(0, 100, length)]).astype(np.int32)
        versions = np.array([-1] * PROMPT + [0] * length, np.int32)
        routes = usual_routes(tokens)
        routes[-1] = 255  # no pass had the last token as an input
        zeros = np.zeros(len(tokens), np.float32)
        made.append(Trajectory(number, of, tokens, zeros, versions, FinishReason.STOP, 1.0, columns={ROUTES: routes}))
    return made


def added(amount: float) -> Fault:
    return lambda positions, cache: np.full(len(positions), amount)


def stale_cache(positions: np.ndarray, cache: str | None) -> np.ndarray:
    return np.full(len(positions), 0.3 if cache is None else 0.0)


def other_rope(positions: np.ndarray, cache: str | None) -> np.ndarray:
    return 2e-4 * positions**2


def flipped_route(positions: np.ndarray, cache: str | None) -> np.ndarray:
    return np.where(positions == PROMPT + 3, 4.0, 1e-4)


FAULTS = {
    "one wrong tensor": (
        [FakeServer("server 0"), FakeServer("server 1", added(0.3), "1 of 9 tensors differ: layers.0.gate_up_proj")],
        r"the weights of server 1 \(of 2 servers, the others agree\)\. server 1: 1 of 9 tensors .*gate_up_proj",
    ),
    "a wrong transport": (
        [FakeServer("server 0", added(0.3), "transport of q_proj"), FakeServer("server 1", added(0.3), "transport")],
        r"the weights of every server\. .*do not arrive as they are sent: .*transport of q_proj",
    ),
    "a stale prefix cache": (
        [FakeServer("server 0", stale_cache), FakeServer("server 1")],
        r"the prefix cache of server 0 \(of 2 servers.*disable_radix_cache=true",
    ),
    "a wrong rope": (
        [FakeServer("server 0", other_rope), FakeServer("server 1", other_rope)],
        r"the computation of every server, whose weights are the trainer's\. Log-probs after a single token agree.*rope_theta",
    ),
    "a flipped route": (
        [FakeServer("server 0", flipped_route), FakeServer("server 1", flipped_route)],
        r"the computation of every server, .*few tokens, as if servers and trainer choose different experts",
    ),
    "another kernel": (
        [FakeServer("server 0", added(0.2)), FakeServer("server 1", added(0.2))],
        r"the computation of every server, .*in all tokens alike",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_after_warnings(fault: str) -> None:
    servers, words = FAULTS[fault]
    scene = Scene(servers, "rollout.drift_patience=3", experts=fault == "a flipped route")

    async def steps() -> None:
        for version in (4, 5, 6):
            await scene.step(version)

    with pytest.raises(LogprobDrift, match=words) as raised:
        asyncio.run(steps())
    assert "at version 4 to 6" in str(raised.value) and "rollout.max_logprob_diff allows 0.05" in str(raised.value)
    assert "(1 of 3 steps)" in scene.said[0] and "(2 of 3 steps)" in scene.said[1] and len(scene.said) == 2
    assert fault != "a wrong rope" or "The difference grows with the position" in scene.said[0]
    assert scene.sent == ([] if fault == "a stale prefix cache" else [6])


@pytest.mark.parametrize("wrong", ["late", "stalls"])
def test_a_server_that_cannot_compare_its_weights_is_not_accused_of_others(wrong: str) -> None:
    scene = Scene([FakeServer("server 0", added(0.3), wrong)], "rollout.drift_patience=1")
    with pytest.raises(LogprobDrift) as raised:
        asyncio.run(scene.step(0))
    assert "differ even without the prefix cache" in str(raised.value)
    assert "the weights of" not in str(raised.value) and "whose weights are" not in str(raised.value)


def test_weights_that_are_sent_twice_are_compared_with_those_before_the_first_time() -> None:
    """As if a server left during the first time: the second time nothing changes any more."""
    server = FakeServer("server 0", added(0.3), "1 of 9 tensors differ: layers.0.gate_up_proj")
    scene = Scene([server], "rollout.drift_patience=1")
    send = scene.send

    async def twice(version: int, deadline: Deadline) -> None:
        await send(version, deadline)
        server.wrong = ""
        await send(version, deadline)

    scene.send = twice
    with pytest.raises(LogprobDrift, match="the weights of server 0"):
        asyncio.run(scene.step(0))


def test_experts_that_servers_chose_otherwise_are_replayed_and_are_no_drift() -> None:
    servers = [FakeServer(f"server {number}") for number in range(3)]
    servers[1].flips = {PROMPT + 3: 2, PROMPT + 5: 0}
    scene = Scene(servers, experts=True, routes=SHAPE)
    assert asyncio.run(scene.step(0)) == {"logprob_diff_probe": pytest.approx(0, abs=1e-6)}
    assert scene.said == []
    assert len(scene.passes) == 2  # one for the servers that agree


def test_without_replay_the_same_experts_are_a_drift_that_replay_would_remove() -> None:
    servers = [FakeServer("server 0")]
    servers[0].flips = {PROMPT + 3: 2}
    scene = Scene(servers, experts=True)
    assert asyncio.run(scene.step(0))["logprob_diff_probe"] == pytest.approx(OTHERWISE / RESPONSE)
    assert "Try rollout.router_replay=on" in scene.said[0]


def test_experts_that_are_not_those_computed_with_are_named_with_their_layer() -> None:
    """The trainer agrees if its routers choose by themselves from that layer on."""
    servers = [FakeServer("server 0"), FakeServer("server 1")]
    for server in servers:
        server.returned = {PROMPT + 3: 2, PROMPT + 5: 1, PROMPT + 7: 1, PROMPT + 8: 2}
    scene = Scene(servers, "rollout.drift_patience=1", experts=True, routes=SHAPE)
    words = r"the servers return for layer 2 are not those .* computed with: .*Try rollout\.router_replay=off"
    with pytest.raises(LogprobDrift, match=words):
        asyncio.run(scene.step(0))


def test_experts_are_compared_with_those_of_generation_where_the_trainer_alone_would_not_agree() -> None:
    servers = [FakeServer("server 0"), FakeServer("server 1")]
    for server in servers:
        server.flips = {PROMPT + 10: 2}
        server.returned = server.flips | {PROMPT + 3: 1, PROMPT + 5: 1, PROMPT + 8: 0}
    scene = Scene(servers, "rollout.drift_patience=1", experts=True, routes=SHAPE)
    words = (
        rf"other experts than during generation for 32 of {2 * 4 * RESPONSE} tokens, most often in layer 2 "
        r"\(16 tokens\)\. .*Try rollout\.router_replay=off"
    )
    with pytest.raises(LogprobDrift, match=words):
        asyncio.run(scene.step(0))


def test_experts_that_are_not_returned_are_told_from_those_that_are() -> None:
    servers = [FakeServer("server 0"), FakeServer("server 1")]
    servers[1].flips, servers[1].returned = {PROMPT + 3: 1}, {}
    scene = Scene(servers, "rollout.drift_patience=1", experts=True, routes=SHAPE)
    words = r"of server 1 \(of 2 servers.*the same experts as during generation.*router_replay=off"
    with pytest.raises(LogprobDrift, match=words):
        asyncio.run(scene.step(0))


def test_a_fault_in_all_tokens_is_not_laid_on_a_few_other_experts() -> None:
    servers = [FakeServer("server 0", added(0.3))]
    servers[0].flips = {PROMPT + 3: 1}
    scene = Scene(servers, "rollout.drift_patience=1", experts=True, routes=SHAPE)
    with pytest.raises(LogprobDrift, match="in all tokens alike"):
        asyncio.run(scene.step(0))


def test_a_step_that_agrees_starts_the_count_again() -> None:
    server = FakeServer("server 0")
    scene = Scene([server], "rollout.drift_patience=2")

    async def steps() -> None:
        for version, amount in enumerate([0.3, 0.0, 0.3, 0.0]):
            server.fault = added(amount)
            assert (await scene.step(version))["logprob_diff_probe"] == pytest.approx(amount, abs=1e-6)

    asyncio.run(steps())
    assert [text.split(":")[1].split("at ")[1] for text in scene.said] == ["version 0", "version 2"]


def test_a_probe_is_scored_as_training_does_within_its_budget() -> None:
    scene = Scene([FakeServer("server 0")], f"rollout.drift_probe_tokens={2 * (PROMPT + RESPONSE)}")
    assert asyncio.run(scene.step(0)) == {"logprob_diff_probe": pytest.approx(0, abs=1e-6)}
    (batch,) = scene.passes
    assert batch.lengths.tolist() == [PROMPT + RESPONSE] * 2
    assert (batch.tokens[:PROMPT] == batch.tokens[PROMPT + RESPONSE :][:PROMPT]).all()  # which prompts are shared
    assert len(choose_probe(responses(), 1)) == 1
    assert choose_probe(responses(), 0) == choose_probe([], 100) == []


def test_a_server_that_fails_is_left_out_and_reported_once() -> None:
    servers = [FakeServer("server 0"), FakeServer("server 1", added(9.0))]
    servers[1].fails = True
    scene = Scene(servers)

    async def steps() -> None:
        for version in range(3):
            assert (await scene.step(version))["logprob_diff_probe"] < LIMIT
        servers[0].fails = True
        assert await scene.step(3) == {}

    asyncio.run(steps())
    assert [text.split(" did not")[0] for text in scene.said] == ["warning: server 1", "warning: server 0"]


@pytest.mark.parametrize("fault", [added(0.3), stale_cache])
def test_servers_without_memory_are_asked_for_nothing_in_the_trainers_time_slice(fault: Fault) -> None:
    """With time-shared GPUs they score in their own time slice; their weights and pairs are not compared."""
    servers = [FakeServer("server 0", fault, "1 of 9 tensors differ: layers.0.gate_up_proj"), FakeServer("server 1")]
    servers[1].flips = {PROMPT + 3: 2}
    scene = Scene(servers, "rollout.sharing=alternate", "rollout.drift_patience=1", experts=True, routes=SHAPE)

    async def step() -> None:
        async def has_no_memory(*_: Any, **__: Any) -> Any:
            raise AssertionError("asked in the trainer's time slice")

        await scene.alarm.score(responses())
        for server in servers:
            server.token_scores = server.note_weights = server.compare_noted = has_no_memory
        await scene.alarm.compare(3)

    words = (
        "The log-probs of server 0 .* differ even without"
        if fault is not stale_cache
        else "the prefix cache of server 0"
    )
    with pytest.raises(LogprobDrift, match=words):
        asyncio.run(step())
    assert scene.sent == []


def test_the_probe_is_scored_before_the_servers_lose_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def train(*_: Any) -> dict[str, float]:
        told.append("train")
        return {}

    class Noting:
        def __getattr__(self, name: str) -> Any:
            async def note(*_: Any) -> Any:
                told.append(name)
                return {} if name == "compare" else []

            return note

    noting, record = (
        cast(Any, Noting()),
        cast(Any, SimpleNamespace(phase=lambda name: nullcontext())),
    )
    policy = Policy("", load(CONFIG).config, noting, noting, noting)
    parts = Parts({"": policy}, noting, noting, noting, sharing=noting, hooks=[DriftHook({"": noting}, record)])
    monkeypatch.setattr(loop, "train_step", train)

    async def run() -> None:
        step = await loop._next_step(parts, 0, record, None)
        assert step
        await loop._train(parts, step, record)

    asyncio.run(run())
    assert told == ["to_servers", "next_batch", "score", "to_trainer", "compare", "train", "observe"]


class MaskedTrainer:
    """Log-probs over the kept ids of each token, or all of them, of logits that depend on the token before."""

    logits = np.random.default_rng(5).normal(size=(100, 100))

    async def log_probs(self, batch: Batch, temperature: float) -> np.ndarray:
        logits, place = self.logits[np.roll(batch.tokens, 1)] / temperature, np.arange(len(batch.tokens))
        if (kept := batch.fields.get(KEPT)) is not None:
            outside = np.ones_like(logits, bool)
            outside[np.repeat(place, kept.counts), kept.ids] = False
            logits = np.where(outside & (kept.counts > 0)[:, None], -np.inf, logits)
        totals = np.log(np.exp(logits).sum(1))
        return ((logits[place, batch.tokens] - totals) * batch.fields["loss_mask"]).astype(np.float32)


def masked_responses(returned: int) -> list[Trajectory]:
    """Responses that were sampled from 5 ids, of which the server returns so many beside the sampled one."""
    made = []
    for item in responses():
        lists = [[(token + more) % 100 for more in range(5)] for token in item.tokens.tolist()]
        whole = [ids if generated else [] for ids, generated in zip(lists, item.generated, strict=True)]
        batch = batch_of([replace(item, columns={KEPT: Ragged.from_lists(whole)})], 0)
        logprobs = asyncio.run(MaskedTrainer().log_probs(batch, 0.7))
        kept = Ragged.from_lists([ids[: 1 + returned] for ids in whole])
        made.append(replace(item, columns={KEPT: kept}, logprobs=logprobs))
    return made


def test_a_fault_of_the_kept_ids_is_seen_before_the_first_step_and_during_generation_but_not_by_the_probe() -> None:
    config = load(CONFIG, ["gconfig.temperature=0.7", f"rollout.max_logprob_diff={LIMIT}"]).config
    trainer = cast(Any, MaskedTrainer())
    asyncio.run(check_logprobs(config, trainer, masked_responses(4)))
    faulty = masked_responses(3)
    with pytest.raises(LogprobMismatch) as raised:
        asyncio.run(check_logprobs(config, trainer, faulty))

    # the figure of a later step is this distance too, unless requests continue in place
    settings = ("rollout.drift_patience=1", "gconfig.temperature=0.7")
    for requests in ("drain", "recompute"):
        scene = Scene([FakeServer("server 0")], *settings, f"weight_update.requests={requests}")
        with pytest.raises(LogprobDrift, match="sampling differs from the trainer's scoring"):
            asyncio.run(scene.alarm.observe(1, distance(faulty, trainer)))
    assert distance(faulty, trainer) > LIMIT and "apart on average" in str(raised.value)

    # the probe compares models over the whole vocabulary: servers score anew without kept ids
    scene = Scene([FakeServer("server 0")], *settings, "weight_update.requests=in_place")
    asyncio.run(scene.alarm.score(faulty))
    assert asyncio.run(scene.alarm.compare(1))["logprob_diff_probe"] == pytest.approx(0, abs=1e-6)
    asyncio.run(scene.alarm.observe(1, distance(faulty, trainer)))
    assert [KEPT in batch.fields for batch in scene.passes] == [False] and scene.said == []


def distance(items: list[Trajectory], trainer: Any) -> float:
    batch = batch_of(items, 0)
    trained = asyncio.run(trainer.log_probs(batch, 0.7))
    return float(np.abs(trained - batch.fields["behaviour_logprobs"])[batch.fields["loss_mask"] > 0].mean())


class Clock:
    """Time that passes while servers answer, and nothing else happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        self.ends.append(end)
        while self.now < end:
            for _ in range(20):  # in which everything else happens that can
                await asyncio.sleep(0)
            if end == min(self.ends):
                self.now = end
        self.ends.remove(end)


class SlowServer(FakeServer):
    """A server whose answers take some seconds of a clock, however many it gives at once."""

    def __init__(self, name: str, clock: Clock, takes: float) -> None:
        super().__init__(name)
        self.clock, self.takes, self.asked = clock, takes, list[float]()

    async def token_scores(self, tokens: Ints, timeout_s: float, **more: Any) -> tuple[np.ndarray, Routes | None]:
        self.asked.append(timeout_s)
        await self.clock.sleep(min(self.takes, timeout_s))
        if self.takes > timeout_s:
            raise ServerError(f"{self.name} did not answer within {timeout_s:.3g} s", "late", [self.name])
        return await super().token_scores(tokens, timeout_s, **more)


def test_a_saturated_server_delays_a_step_by_one_time_limit_and_ever_fewer_steps(monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(http, "time", clock)
    slow, quick = SlowServer("server 0", clock, 20.0), SlowServer("server 1", clock, 0.1)
    scene = Scene([slow, quick])
    delayed: list[int] = []

    async def steps(first: int, count: int) -> None:
        for version in range(first, first + count):
            before = clock.now
            assert (await scene.step(version))["logprob_diff_probe"] < LIMIT  # of the other server
            assert clock.now - before <= PROBE_S + 0.01
            delayed.extend([version] * (clock.now - before > 1))

    asyncio.run(steps(0, 200))
    assert np.diff(delayed).tolist() == [2, 3, 5, 9, 17, 33, 65, 65] and LONGEST == 64
    assert slow.asked[:2] == [PROBE_S, pytest.approx(PROBE_S - 20)]  # all requests of a step share one limit
    (said,) = scene.said
    assert "server 0 did not answer within 10 s. It is left out of 1 more step, and of twice as many" in said

    slow.takes, asked = 0.1, len(slow.asked)
    asyncio.run(steps(200, 65))
    assert len(slow.asked) > asked  # it scores again, in every step
    slow.takes, delayed = 20.0, []
    asyncio.run(steps(265, 4))
    assert delayed == [265, 267]


def test_a_server_that_failed_is_left_with_no_request_of_the_probe() -> None:
    class Refusing(FakeServer):
        running, asked = 0, 0

        async def token_scores(self, *tokens: Any, **more: Any) -> tuple[np.ndarray, Routes | None]:
            self.asked += 1
            if self.asked == 1:
                return await super().token_scores(*tokens, **more)
            self.running += 1
            try:
                await asyncio.sleep(0)
                if self.asked == 4 and self.running == 3:
                    raise ServerError("server 0 answered 400", "refused")
                await asyncio.Event().wait()
            finally:
                self.running -= 1
            raise AssertionError

    server = Refusing("server 0")

    async def run() -> None:
        scene = Scene([server])
        await scene.alarm.score(responses())
        await asyncio.sleep(0)
        assert (server.asked, server.running) == (4, 0)
        assert await scene.alarm.compare(0) == {}

    asyncio.run(run())


def test_all_pairs_of_the_last_evidence_share_one_time_limit(monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(http, "time", clock)
    server = SlowServer("server 0", clock, 1.0)
    server.fault = added(0.3)
    scene = Scene([server], "rollout.drift_patience=1")

    async def run() -> None:
        await scene.alarm.score(responses())
        server.takes = 20.0
        await scene.alarm.compare(0)

    with pytest.raises(LogprobDrift, match="in all tokens alike"):
        asyncio.run(run())
    assert clock.now <= 4 + PROBE_S + 0.01


@pytest.mark.parametrize(("requests", "ends"), [("drain", True), ("recompute", True), ("in_place", False)])
def test_log_probs_of_generation_alone_point_to_decoding(requests: str, ends: bool) -> None:
    """With requests that continue in place, the cache of older weights contributes to them."""
    scene = Scene([FakeServer("server 0")], "rollout.drift_patience=1", f"weight_update.requests={requests}")
    if ends:
        with pytest.raises(LogprobDrift, match=r"generation: .*disable_cuda_graph=true"):
            asyncio.run(scene.step(2, figure=0.4))
    else:
        asyncio.run(scene.step(2, figure=0.4))
        assert scene.said == []


def test_weights_that_change_when_they_are_sent_once_more_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    note(model, {})
    compare_noted(model, {})
    with torch.no_grad():
        model[1].weight[0, 1] += 1e-6
    with pytest.raises(ValueError, match=r"1 of 4 tensors differ from the trainer's: 1\.weight"):
        compare_noted(model, {})
    assert int(checksum(model[1].weight)) == model.noted["1.weight"]


class SlowScene(Scene):
    """A run whose steps take `step_s` seconds beside the probe, and every pass for a probe one second, by its clock."""

    def __init__(self, servers: Sequence[FakeServer], step_s: float) -> None:
        self.now, self.probed = 0.0, 0.0
        self.step_s = step_s
        super().__init__(servers, "rollout.drift_patience=3", clock=lambda: self.now)

    async def log_probs(self, batch: Batch, temperature: float) -> np.ndarray:
        self.now, self.probed = self.now + 1, self.probed + 1
        return await super().log_probs(batch, temperature)

    async def step(self, version: int, figure: float | None = None) -> dict[str, float]:
        self.now += self.step_s
        return await super().step(version, figure)


@pytest.mark.parametrize("step_s", [0.5, 5.0, 100.0])
def test_probes_take_at_most_a_small_share_of_the_time(step_s: float) -> None:
    scene = SlowScene([FakeServer("server 0")], step_s)

    async def steps() -> list[bool]:
        return [bool(await scene.step(version)) for version in range(400)]

    probed = asyncio.run(steps())
    assert all(probed[:FIRST]) and any(probed[FIRST:])
    assert scene.probed - FIRST <= SHARE * scene.now
    assert all(probed) == (step_s > 1 / SHARE)


def test_a_difference_is_measured_in_each_step_and_named() -> None:
    server = FakeServer("server 0")
    scene = SlowScene([server], step_s=1.0)

    async def steps() -> None:
        for version in range(200):
            if version == 50:
                server.fault, server.wrong = added(0.3), "1 of 9 tensors differ: layers.0.gate_up_proj"
            await scene.step(version)

    with pytest.raises(LogprobDrift, match="the weights of server 0") as raised:
        asyncio.run(steps())
    first, last = map(int, re.search(r"at version (\d+) to (\d+)", str(raised.value)).groups())
    assert 50 <= first <= 50 + 1 / SHARE and last == first + 2
