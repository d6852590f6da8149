"""Which failures restart the trainer, how often, and what ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from limits import HUNG_S

from areal_like.core.errors import CheckpointError, WeightUpdateError, WorkerError
from areal_like.run import trainer_restarts
from areal_like.run.trainer_restarts import Budget, StartedTrainer, train_to_the_end

DEATH = WorkerError("actor", 1, "training", "the process died (killed)", Path("actor-1.log"))
RAISED = WorkerError("actor", 0, "training", "RuntimeError: no memory", Path("actor-0.log"), "Traceback ...")
OF_A_SERVER = WorkerError("rollout", 0, "serving", "the process died (killed)", Path("rollout-0.log"))


class Ranks:
    """The processes of a role, of which one may be dead or busy."""

    role = "actor"
    members = ()

    def __init__(self, state: str) -> None:
        self.state = state

    async def call_all(self, method: str, *, phase: str, timeout: float) -> None:
        if self.state == "dead":
            raise DEATH
        if self.state == "busy":
            await asyncio.sleep(HUNG_S)


def run(failures: Sequence[Exception | None], *, ranks: str = "there", most: int = 3) -> tuple[list[str], list[str]]:
    """Train with attempts that fail so one after the other; return what was done, and what was reported."""
    done, said, left = list[str](), list[str](), list(failures)

    async def train() -> None:
        done.append("train")
        if (failure := left.pop(0)) is not None:
            async with asyncio.TaskGroup():
                raise failure

    async def settle() -> None:
        done.append("settle")

    def attempt() -> StartedTrainer:
        return StartedTrainer([Ranks(ranks)], {}, train, settle)  # type: ignore[list-item]

    async def restart(lost: WorkerError) -> StartedTrainer:
        done.append("restart")
        if left and isinstance(left[0], CheckpointError | WorkerError) and left[0].args == ("restart",):
            raise left.pop(0)  # type: ignore[misc]
        return attempt()

    async def whole() -> None:
        await train_to_the_end(attempt(), restart, most, None, said.append)

    try:
        asyncio.run(asyncio.wait_for(whole(), HUNG_S))
    except ExceptionGroup as group:
        first: Exception = group
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return done, said


def test_the_loss_of_a_rank_restarts_the_trainer_once_nothing_of_it_is_written_any_more() -> None:
    done, (said,) = run([DEATH, None])
    assert done == ["train", "settle", "restart", "train"]
    assert said == (
        "actor rank 1: the process died (killed). The trainer restarts from the last checkpoint "
        "(recover.restarts_per_hour=3)."
    )


@pytest.mark.parametrize("failure", [RAISED, OF_A_SERVER, WeightUpdateError("server 0 refused")])
@pytest.mark.parametrize("ranks", ["there", "busy"])
def test_a_failure_while_all_ranks_are_there_ends_the_run(
    failure: Exception, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_restarts, "ANSWER_S", 0.2)
    with pytest.raises(type(failure)) as raised:
        run([failure, None], ranks=ranks)
    assert raised.value is failure


def test_a_failure_that_a_dead_rank_explains_restarts_the_trainer() -> None:
    assert run([RAISED, None], ranks="dead")[0] == ["train", "settle", "restart", "train"]


@pytest.mark.parametrize("most", [0, 2])
def test_one_loss_more_than_allowed_ends_the_run(most: int) -> None:
    with pytest.raises(WorkerError) as raised:
        run([DEATH] * (most + 1), most=most)
    assert raised.value is DEATH


def test_a_run_without_a_checkpoint_ends_with_the_loss_and_the_reason() -> None:
    lost = WorkerError("actor", 1, "training", "the process died (killed)", Path("actor-1.log"))
    with pytest.raises(WorkerError) as raised:
        run([lost, CheckpointError("restart"), None])
    assert raised.value is lost
    assert lost.__notes__ == ["restart"]


def test_a_budget_is_that_of_an_hour() -> None:
    now = [0.0]
    budget = Budget(2, lambda: now[0])
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    now[0] = 3600.0
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_a_silent_host_of_the_trainer_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    class Member:
        rank, host, log_file = 1, "10.0.0.9", Path("actor-1.log")

    class Silent(Ranks):
        members = (Member(),)  # type: ignore[assignment]

    async def silence(url: str, limit_s: float) -> None:
        assert (url, limit_s) == ("http://10.0.0.9:1", 10.0)

    monkeypatch.setattr(trainer_restarts, "wait_for_silence", silence)
    trained: list[str] = []

    def attempt(*trains: Callable[[], Awaitable[Any]], beats: dict[str, str]) -> StartedTrainer:
        async def settle() -> None: ...

        return StartedTrainer([Silent("busy")], beats, trains[0], settle)  # type: ignore[list-item]

    async def hang() -> None:
        await asyncio.sleep(HUNG_S)

    async def end() -> None:
        trained.append("to its end")

    async def restart(lost: WorkerError) -> StartedTrainer:
        trained.append(str(lost.cause))
        return attempt(end, beats={})

    first = attempt(hang, beats={"10.0.0.9": "http://10.0.0.9:1"})
    asyncio.run(asyncio.wait_for(train_to_the_end(first, restart, 1, 10.0, print), HUNG_S))
    assert trained == ["host 10.0.0.9 did not answer for 10 s (cluster.host_timeout_s)", "to its end"]


def test_a_rank_that_is_lost_while_it_starts_is_started_again_as_often_as_allowed() -> None:
    class Trained(Exception):
        pass

    async def settle() -> None: ...

    async def die() -> None:
        raise DEATH

    async def train() -> None:
        raise Trained

    starts: list[int] = []

    async def restart(lost: WorkerError) -> StartedTrainer:
        starts.append(1)
        if len(starts) == 1:
            async with asyncio.TaskGroup():  # as the ranks of all roles start
                raise DEATH
        return StartedTrainer([Ranks("there")], {}, train, settle)  # type: ignore[list-item]

    first = StartedTrainer([Ranks("there")], {}, die, settle)  # type: ignore[list-item]
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(train_to_the_end(first, restart, 1, None, print))
    assert raised.group_contains(WorkerError)
    starts.clear()
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(train_to_the_end(first, restart, 2, None, print))
    assert raised.group_contains(Trained)
    assert len(starts) == 2
