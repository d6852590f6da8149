"""Keeps groups generating while the trainer trains, and returns batches within the staleness bound.

The ledger accounts for every generated token: each is in one place.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from areal_like.core.events import span
from areal_like.core.rollout.admission import Admission
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.types import Prompt, Trajectory, Workflow, generated_in, mean_reward

STARTED = 32  # groups that start in one turn of the event loop, each some 50 us of work


@dataclass(eq=False, kw_only=True)
class Collector:
    """A workflow for each of `groups` prompts, as many at once as the staleness bound and `max_groups` admit.

    Every admitted group is handed out exactly once, unless `keeps` rejects it, or it is one of the admission's
    `spare` groups that a batch does not wait for: then another one takes its place.
    After `max_drops` groups in a row that were not kept the next one is, and counting starts anew, so that a policy
    that always does the same still ends its run. Groups run as tasks of `tasks`, so the first one that fails ends the
    run. A group's id is its prompt's place in `prompts`. A run that is resumed starts the groups `again`, which
    had been admitted but not trained, and continues with group `started`.
    """

    prompts: PromptStream
    groups: int
    workflow: Workflow
    admission: Admission
    max_groups: int | None
    tasks: asyncio.TaskGroup
    keeps: Callable[[Sequence[Trajectory]], bool] | None = None
    max_drops: int = 0
    again: Sequence[int] = ()
    started: int = 0  # groups that ever were
    dropped: int = 0  # groups that were not kept, or given up
    note_drop: Callable[[int, float], None] = lambda group, reward: None  # mean reward of a group that was not kept
    tokens_generated: int = 0  # in the trajectories of finished groups: trained, dropped, or waiting to be trained
    tokens_trained: int = 0  # by this process, like the following counts
    tokens_dropped: int = 0
    taken: list[int] = field(default_factory=list, init=False)  # the groups of the last batch
    _again: deque[int] = field(init=False)
    _drops_in_row: int = field(default=0, init=False)
    _running: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _began: dict[int, float] = field(default_factory=dict, init=False)  # when the running groups started
    _finished: dict[int, list[Trajectory]] = field(default_factory=dict, init=False)
    _tokens: dict[int, int] = field(default_factory=dict, init=False)  # of the finished groups
    tokens_waiting: int = field(default=0, init=False)  # of groups that are finished and not trained yet
    _is_filling: bool = field(default=False, init=False)
    _told: int = field(init=False)  # how many of the dropped ones
    _progress: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self._again, self._told = deque(self.again), self.dropped

    @property
    def started_by_adapter(self) -> Mapping[str, int]:
        """Nothing: a collector's groups are of one policy."""
        return {}

    def prompt(self, group_id: int) -> Prompt:
        """Return the prompt of a group."""
        return self.prompts[group_id]

    @property
    def oldest_s(self) -> float:
        """Seconds for which the oldest unfinished group has run."""
        return time.monotonic() - min(self._began.values()) if self._began else 0.0

    def newly_dropped(self) -> int:
        """Return how many groups were dropped since the last call."""
        before, self._told = self._told, self.dropped
        return self._told - before

    @property
    def untrained(self) -> list[int]:
        """Ids of the groups that were admitted, now or before the run was resumed, and are not trained yet."""
        return [*self.admission.waiting, *self._again]

    async def next_batch(self) -> list[Trajectory]:
        """Wait for the next batch; its groups are complete, in order of age."""
        self._fill()
        while (groups := self.admission.take()) is None:
            self._progress.clear()
            await self._progress.wait()
        self.taken = groups
        for group in self.admission.given_up:
            self._give_up(group)
        batch = [trajectory for group in groups for trajectory in self._finished.pop(group)]
        tokens = sum(self._tokens.pop(group) for group in groups)
        self.tokens_trained += tokens
        self.tokens_waiting -= tokens
        self._fill()
        return batch

    def publish(self, version: int) -> None:
        """Note that every server holds `version`, and start the groups that this admits."""
        self.admission.publish(version)
        self._fill()

    def _fill(self) -> None:
        """Start the groups that may start, STARTED in each turn of the event loop."""
        if not self._is_filling and self._start_some():
            self._is_filling = True
            self.tasks.create_task(self._start_others())

    async def _start_others(self) -> None:
        try:
            await asyncio.sleep(0)
            while self._start_some():
                await asyncio.sleep(0)
        finally:
            self._is_filling = False

    def _start_some(self) -> bool:
        """Start up to STARTED groups; returns whether there are more."""
        for _ in range(STARTED):
            if not self._may_start():
                return False
            self._start()
        return self._may_start()

    def _may_start(self) -> bool:
        has_prompts = bool(self._again) or self.started - self.dropped < self.groups
        return has_prompts and self.admission.capacity > 0 and len(self._running) != self.max_groups

    def _start(self) -> None:
        group_id = self._again.popleft() if self._again else self.started
        self.started = max(self.started, group_id + 1)
        self.admission.start(group_id)
        self._began[group_id] = time.monotonic()
        self._running[group_id] = self.tasks.create_task(self._run(group_id), name=f"group {group_id}")

    def _give_up(self, group_id: int) -> None:
        """Cancel an unneeded group, or drop its trajectories."""
        self.dropped += 1
        if task := self._running.pop(group_id, None):
            del self._began[group_id]
            task.cancel()
        else:
            del self._finished[group_id]
            tokens = self._tokens.pop(group_id)
            self.tokens_waiting -= tokens
            self.tokens_dropped += tokens

    async def _run(self, group_id: int) -> None:
        with span("groups", "group", group=group_id):
            trajectories = await self.workflow(self.prompts[group_id], group_id)
        self.tokens_generated += (tokens := generated_in(trajectories))
        if self._running.pop(group_id, None) is None:  # it was given up, and ended before it could be broken off
            self.tokens_dropped += tokens
            return
        del self._began[group_id]
        if self._is_dropped(trajectories):
            self.dropped += 1
            self.tokens_dropped += tokens
            if (reward := mean_reward(trajectories)) is not None:
                self.note_drop(group_id, reward)
            self.admission.drop(group_id)
        else:
            self._finished[group_id], self._tokens[group_id] = trajectories, tokens
            self.tokens_waiting += tokens
            self.admission.finish(group_id)
        self._progress.set()
        self._fill()

    def _is_dropped(self, trajectories: Sequence[Trajectory]) -> bool:
        if self.keeps is None or self.keeps(trajectories):
            self._drops_in_row = 0
            return False
        self._drops_in_row = (self._drops_in_row + 1) % (self.max_drops + 1)
        return self._drops_in_row > 0


class Collectors:
    """The collectors of several adapters as one: a batch is the next batch of each.

    A training step raises one version, so the staleness bound holds for each. The group with number k of the adapter at
    place i of n has the id `i + n * k`, so ids of adapters are disjoint.
    """

    def __init__(self, own: Mapping[str, Collector]) -> None:
        self._own = list(own.values())
        self._names = list(own)
        for place, collector in enumerate(self._own):
            collector.workflow = _renumber(collector.workflow, place, len(own))
            if collector.max_groups is not None:
                collector.max_groups = max(1, collector.max_groups // len(own))

    def prompt(self, group_id: int) -> Prompt:
        """Return the prompt of a group."""
        number, place = divmod(group_id, len(self._own))
        return self._own[place].prompt(number)

    async def next_batch(self) -> list[Trajectory]:
        """Wait for the next batch of every adapter."""
        batches = await asyncio.gather(*(collector.next_batch() for collector in self._own))
        return [trajectory for batch in batches for trajectory in batch]

    def publish(self, version: int) -> None:
        """Note that every server holds `version`, and start the groups that this admits."""
        for collector in self._own:
            collector.publish(version)

    @property
    def dropped(self) -> int:
        """Groups that were dropped, in the whole run."""
        return sum(collector.dropped for collector in self._own)

    @property
    def oldest_s(self) -> float:
        """Seconds for which the oldest unfinished group has run."""
        return max(collector.oldest_s for collector in self._own)

    def newly_dropped(self) -> int:
        """Return how many groups were dropped since the last call."""
        return sum(collector.newly_dropped() for collector in self._own)

    @property
    def taken(self) -> list[int]:
        """The groups of the last batch."""
        return self._ids([collector.taken for collector in self._own])

    @property
    def untrained(self) -> list[int]:
        """Ids of the groups that were admitted and are not trained yet."""
        return self._ids([collector.untrained for collector in self._own])

    @property
    def started(self) -> int:
        """Groups that ever were."""
        return sum(self.started_by_adapter.values())

    @property
    def started_by_adapter(self) -> Mapping[str, int]:
        """Groups of each adapter that ever were."""
        return {name: collector.started for name, collector in zip(self._names, self._own, strict=True)}

    @property
    def tokens_generated(self) -> int:
        """Tokens in the trajectories of finished groups."""
        return sum(collector.tokens_generated for collector in self._own)

    @property
    def tokens_trained(self) -> int:
        """Tokens of trained groups, in this process."""
        return sum(collector.tokens_trained for collector in self._own)

    @property
    def tokens_dropped(self) -> int:
        """Tokens of dropped groups, in this process."""
        return sum(collector.tokens_dropped for collector in self._own)

    @property
    def tokens_waiting(self) -> int:
        """Tokens of groups that are finished and not trained yet."""
        return sum(collector.tokens_waiting for collector in self._own)

    def _ids(self, numbers: Sequence[Sequence[int]]) -> list[int]:
        return [place + len(self._own) * number for place, own in enumerate(numbers) for number in own]


def _renumber(workflow: Workflow, place: int, adapters: int) -> Workflow:
    """Return a workflow whose groups have the ids of an adapter's."""

    async def run(prompt: Prompt, number: int) -> list[Trajectory]:
        return await workflow(prompt, place + adapters * number)

    return run


type AnyCollector = Collector | Collectors


def token_ledger(pool: ServerPool, collector: AnyCollector, evaluated: int) -> Mapping[str, float]:
    """Return the tokens since the run started or resumed, by place; `generated` is the sum of the others.

    `unfinished` counts ended samples in an unfinished group or evaluation. `orphaned` counts answers that no client has
    read, `unused` tokens that a workflow left out of its trajectories, or behind a stop text.
    """
    finished = {
        "trained": collector.tokens_trained,
        "waiting": collector.tokens_waiting,
        "dropped": collector.tokens_dropped,
        "evaluated": evaluated,
    }
    account = {
        "generated": pool.tokens_generated,
        **finished,
        "unfinished": pool.tokens["delivered"] - sum(finished.values()),
        "in_flight": pool.tokens_generated - pool.tokens.total(),
        "cancelled": pool.tokens["cancelled"],
        "failed": pool.tokens["failed"],
        "orphaned": pool.tokens["orphaned"],
        "unused": pool.tokens["unused"],
    }
    return {f"tokens/{name}": float(value) for name, value in account.items()}
