"""Samples go to the servers that a simple rule names, at a cost that does not grow with servers or samples."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from counting import count_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.core.rollout.dispatch import SLACK, UNEVEN, Dispatch, PrefixAffinity, QueueEntry, ServerState


@pytest.fixture(autouse=True)
def event_loop() -> Any:
    """What futures of a server's state belong to."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


class Reference:
    """The rule of the module's docstring, asked of all servers and all samples at every event; it changes nothing."""

    def __init__(self) -> None:
        self.servers: list[ServerState] = []
        self.waiting: list[tuple[int, int, int, QueueEntry, ServerState | None]] = []

    def wait(self, entry: QueueEntry, priority: int, length: int) -> None:
        bound = entry.affinity.state if entry.affinity and entry.affinity.bound else None
        self.waiting.append((priority, -length, len(self.waiting), entry, bound if bound in self.servers else None))

    def next(self) -> tuple[QueueEntry, ServerState] | None:
        waiting = sorted((entry for entry in self.waiting if not entry[3].turn.done()), key=lambda entry: entry[:3])

        def first_of(server: ServerState | None) -> Any:
            return next((entry for entry in waiting if entry[4] is server), None)

        anyones = first_of(None)
        free = [server for server in self.servers if server.takes and (anyones or first_of(server))]
        if not free:
            return None
        chosen = min(free, key=lambda server: server.in_flight)
        own = first_of(chosen)
        if own and not (anyones and anyones[:3] < own[:3]):
            return own[3], chosen
        near = anyones[3].affinity.state if anyones[3].affinity else None
        if near in free and near.in_flight <= UNEVEN * chosen.in_flight + SLACK:
            return anyones[3], near
        return anyones[3], chosen

    def leave(self, server: ServerState) -> None:
        self.servers.remove(server)
        self.waiting = [(*entry[:4], None if entry[4] is server else entry[4]) for entry in self.waiting]


class Both:
    """A dispatch and its reference, which see the same random events."""

    def __init__(self, seed: int, servers: int) -> None:
        self.rng = random.Random(seed)
        self.dispatch, self.reference = Dispatch(), Reference()
        self.running: list[ServerState] = []
        self.entries: list[QueueEntry] = []
        self.affinities = [PrefixAffinity(bound=bound) for bound in (True, False) for _ in range(4)]
        for _ in range(servers):
            self.join()

    def join(self) -> None:
        state = self.dispatch.join(None)  # type: ignore[arg-type]
        self.reference.servers.append(state)
        self.change(state)

    def leave(self, state: ServerState) -> None:
        self.dispatch.leave(state)
        self.reference.leave(state)

    def change(self, state: ServerState) -> None:
        state.capacity = self.rng.choice((0, 1, 3, 50))
        state.failures = self.rng.choice((0, 0, 0, 1))
        state.backing_off = self.rng.random() < 0.2
        self.dispatch.update(state)

    def wait(self) -> None:
        affinity = self.rng.choice((None, *self.affinities))
        priority, length = self.rng.randrange(5), self.rng.randrange(3)
        self.entries.append(QueueEntry(asyncio.Future(), affinity))
        self.dispatch.wait(self.entries[-1], priority, length)
        self.reference.wait(self.entries[-1], priority, length)

    def cancel(self) -> None:
        if self.entries:
            self.rng.choice(self.entries).turn.cancel()

    def done(self) -> None:
        if self.running:
            self.dispatch.release(self.running.pop(self.rng.randrange(len(self.running))))

    def give(self) -> bool:
        expected = self.reference.next()
        got = self.dispatch.next()
        if got is None or expected is None:
            assert got is expected
            return False
        entry, server = expected
        assert (got is server) and entry.turn.result() is server
        self.running.append(got)
        return True

    def event(self) -> None:
        states = list(self.dispatch.states.values())
        kinds: list[tuple[Callable[[], object], int]] = [
            (self.wait, 12),
            (self.done, 8),
            (self.cancel, 1),
            (self.join, 1),
        ]
        if states:
            kinds += [
                (lambda: self.change(self.rng.choice(states)), 3),
                (lambda: self.leave(self.rng.choice(states)), 1),
            ]
        self.rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]()


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), servers=st.integers(0, 6), greedy=st.floats(0.1, 1))
def test_every_sample_goes_where_the_rule_says(seed: int, servers: int, greedy: float) -> None:
    """Samples with and without affinity, servers that fail, fill up, join and leave, and samples that nobody wants."""
    both = Both(seed, servers)
    for _ in range(150):
        both.event()
        while both.rng.random() < greedy and both.give():
            pass
        here = both.dispatch.states.values()
        assert both.dispatch.in_flight == sum(state.in_flight for state in here)
        assert all(state.in_flight == both.running.count(state) for state in here)
    assert len(both.dispatch._free._heap) <= 64 + 4 * len(both.dispatch.states)


def loaded(servers: int, waiting: int) -> tuple[Dispatch, list[ServerState]]:
    """Full servers, samples that wait, and the server of each sample in flight."""
    dispatch = Dispatch()
    for _ in range(servers):
        state = dispatch.join(None)  # type: ignore[arg-type]
        state.capacity = 10
        dispatch.update(state)
    for number in range(10 * servers + waiting):
        dispatch.wait(QueueEntry(asyncio.Future()), priority=number)
    given = []
    while (state := dispatch.next()) is not None:
        given.append(state)
    return dispatch, given


def test_what_a_sample_costs_does_not_grow_with_servers_and_samples() -> None:
    """Counted in lines of Python that run; only the heaps' C code sees more than one."""

    def lines(servers: int, waiting: int) -> int:
        dispatch, given = loaded(servers, waiting)
        states = random.Random(0).sample(given, 200)

        def exchange() -> None:
            for state in states:
                dispatch.release(state)
                assert dispatch.next() is not None
                dispatch.wait(QueueEntry(asyncio.Future()), priority=10**9)

        return count_lines(exchange)

    assert lines(servers=400, waiting=20_000) <= 1.2 * lines(servers=40, waiting=200)
