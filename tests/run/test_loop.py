"""The loop among parts that do as a test tells them: what follows what, and what ends a run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from limits import HUNG_S
from running import CONFIG

from areal_like.core.algorithms.presets import make_algorithm
from areal_like.core.config.load import load
from areal_like.core.errors import LogprobMismatch, RewardsMissing, ServerError
from areal_like.core.hooks import Hook
from areal_like.core.loop import step as step_module
from areal_like.core.loop.evaluation import EvaluationSet, Evaluator
from areal_like.core.loop.loop import Parts, reinforce
from areal_like.core.loop.policies import Policy, describe
from areal_like.core.loop.step import Models, mean
from areal_like.core.rollout.http import Deadline
from areal_like.core.types import Batch, FinishReason, LossSpec, Prompt, Trajectory
from areal_like.metrics.console import View
from areal_like.metrics.record import Record

SETTINGS = ("evaluator.at_start=false", "actor.ppo_n_minibatches=1")


class Notes(Record):
    """Keeps what it is told: `scalars[step][tag]`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "a title", View(enabled=True))
        self.scalars: dict[int, dict[str, float]] = {}

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.scalars.setdefault(step, {}).update(scalars)


class Stage:
    """Every part of a run but the evaluator; `did` is what happened, in order.

    `rewards` has a pair for each step. The servers' log-probs are -1, the trainer's are `drift` away.
    """

    def __init__(self, rewards: Sequence[tuple[float | None, float | None]], drift: float = 0.0) -> None:
        self.did: list[str] = []
        self.trained = asyncio.Event()  # for the second time
        self.tokens_generated = 0
        self.dropped: list[int] = []  # groups, by step
        self.oldest_s = 1.0  # of the unfinished groups
        self._rewards = iter(rewards)
        self._drift = drift
        self._version = 0

    def newly_dropped(self) -> int:
        return self.dropped.pop(0)

    async def next_batch(self) -> list[Trajectory]:
        made = np.array([-1, self._version, self._version], np.int32)
        logprobs = np.array([0, -1, -1], np.float32)
        return [
            Trajectory(0, self._version, np.arange(3, dtype=np.int32), logprobs, made, FinishReason.STOP, reward)
            for reward in next(self._rewards)
        ]

    def publish(self, version: int) -> None:
        self._version = version

    async def send(self, version: int, deadline: Deadline) -> None:
        self.did.append(f"publish {version}")

    async def log_probs(self, batch: Batch, temperature: float) -> np.ndarray:
        return np.full(len(batch.tokens), -1 + self._drift, np.float32)

    async def train(self, batch: Batch, loss: LossSpec, temperature: float) -> dict[str, float]:
        self.did.append(f"train {self._version}")
        if self._version == 1:
            self.trained.set()
        return {"loss": 0.5, "something new": 2.0, "loss_tokens": 4.0}

    async def save_hf(self, path: Path) -> None:
        self.did.append("save")

    async def save_adapters(self, path: Path) -> None:
        self.did.append(f"save adapters {path.name}")

    def statistics(self) -> dict[str, float]:
        return {"queue_seconds_mean": 0.25, "queue_seconds_max": self._version, "reward_missing/raised": 1.0}


class HeldOut:
    """A workflow of held-out prompts; `wait` comes first."""

    def __init__(self, stage: Stage, wait: Callable[[], object] = lambda: None) -> None:
        self._stage, self._wait = stage, wait

    async def __call__(self, prompt: Prompt, group_id: int) -> list[Trajectory]:
        assert group_id < 0, "a training group's"
        self._stage.did.append("evaluate")
        waiting = self._wait()
        if asyncio.iscoroutine(waiting):
            await waiting
        self._stage.did.append("evaluated")
        made = np.array([-1, 0], np.int32)
        return [Trajectory(0, group_id, np.ones(2, np.int32), np.zeros(2, np.float32), made, FinishReason.STOP, 0.75)]


class Critic:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def save_hf(self, path: Path) -> None:
        self._stage.did.append(f"save {path.name}")


class Follower:
    """A reference that is due every two steps."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def due(self, step: int) -> bool:
        return step % 2 == 0

    async def update(self) -> None:
        self._stage.did.append("follow")


async def train(
    stage: Stage,
    folder: Path,
    *overrides: str,
    steps: int = 3,
    held_out: HeldOut | None = None,
    hooks: Sequence[Hook] = (),
    **roles: Any,
) -> Notes:
    """A run on a stage; what it evaluates, if anything, are two prompts."""
    config = load(CONFIG, [f"cluster.fileroot={folder}", *SETTINGS, *overrides]).config
    sets = {"valid_dataset": EvaluationSet([Prompt(0, [1, 2], "3")] * 2, held_out, 1)} if held_out else {}
    evaluator = Evaluator(config.evaluator, sets)
    policy = Policy("", config, make_algorithm(config), *[cast(Any, stage)] * 2)
    record = Notes(folder)
    parts = Parts({"": policy}, *[cast(Any, stage)] * 2, evaluator, models=Models(**roles), hooks=hooks)
    async with asyncio.timeout(HUNG_S):
        await reinforce(config, parts, steps, record)
    return record


GOOD, NONE = (1.0, 0.0), (None, None)  # rewards of a step


def test_batches_without_a_reward_are_skipped_and_their_versions_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> tuple[Stage, Notes]:
        stage = Stage([NONE, GOOD, NONE, NONE, (None, 1.0)])
        return stage, await train(stage, tmp_path, "reward.max_missing_batches=2", steps=5)

    stage, record = asyncio.run(run())
    assert stage.did == ["publish 1", "train 1", "publish 2", "publish 3", "publish 4", "train 4", "publish 5", "save"]
    assert [record.scalars[step]["reward/skipped_batches"] for step in range(1, 6)] == [1, 0, 1, 1, 0]
    assert [record.scalars[step].get("reward/mean") for step in range(1, 6)] == [None, 0.5, None, None, 1.0]
    assert [record.scalars[step]["reward/missing"] for step in range(1, 6)] == [2, 0, 2, 2, 1]
    assert [record.scalars[step]["reward/queue_seconds_mean"] for step in range(1, 6)] == [0.25] * 5
    assert [record.scalars[step]["reward/queue_seconds_max"] for step in range(1, 6)] == [1, 2, 3, 4, 5]
    assert record.scalars[2]["reward_missing/raised"] == 1.0
    assert "step 4 was skipped: all of its rewards are missing" in capsys.readouterr().out


def test_too_many_of_them_in_a_row_end_the_run(tmp_path: Path) -> None:
    async def run() -> None:
        await train(Stage([GOOD, NONE, NONE]), tmp_path, "reward.max_missing_batches=1")

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(run())
    assert isinstance(raised.value.exceptions[0], RewardsMissing)
    assert str(raised.value.exceptions[0]).startswith("step 3: all 2 rewards are missing")


def test_statistics_are_recorded_under_the_names_that_come(tmp_path: Path) -> None:
    record = asyncio.run(run_well(tmp_path))
    assert record.scalars[1]["train/something new"] == 2
    assert record.scalars[1]["train/loss"] == 0.5


def test_the_reference_follows_what_was_published_and_the_critic_is_saved_beside_the_actor(tmp_path: Path) -> None:
    async def run() -> Stage:
        stage = Stage([GOOD] * 3)
        await train(stage, tmp_path, reference=Follower(stage), critic=Critic(stage))
        return stage

    stage = asyncio.run(run())
    assert stage.did == [
        *("train 0", "publish 1", "train 1", "publish 2", "follow"),
        *("train 2", "publish 3", "save", "save step-3-critic"),
    ]


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_are_saved_and_the_whole_model_where_that_is_asked_for(tmp_path: Path, merged: bool) -> None:
    async def run() -> list[str]:
        stage = Stage([GOOD])
        await train(stage, tmp_path, "actor.use_lora=true", f"saver.merge_lora={merged}".lower(), steps=1)
        return stage.did

    saved = ["save adapters step-1", *(["save"] if merged else [])]
    assert asyncio.run(run()) == ["train 0", "publish 1", *saved]


async def run_well(folder: Path, *overrides: str) -> Notes:
    return await train(Stage([GOOD] * 3), folder, *overrides)


def test_held_out_prompts_are_evaluated_while_the_next_step_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evaluation of version 1 ends only after the step that follows it was trained, and version 2 waits for it."""

    async def run() -> tuple[Stage, Notes]:
        stage = Stage([GOOD] * 3)
        overrides = ("evaluator.freq_steps=1", "evaluator.at_end=false")
        return stage, await train(stage, tmp_path, *overrides, held_out=HeldOut(stage, stage.trained.wait))

    stage, record = asyncio.run(run())
    first = stage.did[: stage.did.index("publish 2")]
    assert first[:2] == ["train 0", "publish 1"]
    assert sorted(first[2:5]) == ["evaluate", "evaluate", "train 1"]
    assert first[5:] == ["evaluated", "evaluated"]
    assert {step: scalars.get("reward/held_out") for step, scalars in record.scalars.items()} == {
        1: 0.75,
        2: 0.75,
        3: None,
    }
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:3] for row in rows if row[0] in "123"] == [
        ["1", "0.500", "0.750"],
        ["2", "0.500", "0.750"],
        ["3", "0.500", "0.5"],
    ]


def test_the_last_step_is_evaluated_before_the_run_ends(tmp_path: Path) -> None:
    async def run() -> Notes:
        stage = Stage([GOOD] * 3)
        return await train(stage, tmp_path, "evaluator.freq_steps=null", held_out=HeldOut(stage))

    assert asyncio.run(run()).scalars[3]["reward/held_out"] == 0.75


def test_an_evaluation_without_rewards_does_not_end_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> Notes:
        stage = Stage([GOOD] * 3)
        return await train(stage, tmp_path, "evaluator.freq_steps=1", held_out=cast(Any, without_rewards))

    async def without_rewards(prompt: Prompt, group_id: int) -> list[Trajectory]:
        return []

    notes = asyncio.run(run())
    assert {1, 2, 3} <= notes.scalars.keys()
    assert not any("reward/held_out" in scalars for scalars in notes.scalars.values())
    assert "all of its rewards are missing" in capsys.readouterr().out


def test_an_evaluation_that_fails_ends_the_run(tmp_path: Path) -> None:
    def fail() -> None:
        raise ServerError("server 0 is gone")

    async def run() -> None:
        stage = Stage([GOOD] * 3)
        await train(stage, tmp_path, "evaluator.freq_steps=1", held_out=HeldOut(stage, fail))

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(run())
    assert str(raised.value.exceptions[0]) == "server 0 is gone"


@pytest.mark.parametrize(
    ("drift", "settings", "allowed"),
    [
        (0.002, ["actor.dtype=float32"], "0.001"),
        (-0.2, ["actor.dtype=bfloat16"], "0.1"),
        (0.2, ["actor.dtype=bfloat16", "rollout.max_logprob_diff=0.15"], "0.15"),
        (float("nan"), ["actor.dtype=bfloat16"], "0.1"),
    ],
)
def test_other_log_probs_than_the_servers_end_the_run_before_its_first_step(
    tmp_path: Path, drift: float, settings: Sequence[str], allowed: str
) -> None:
    stage = Stage([GOOD] * 3, drift)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(train(stage, tmp_path, *settings))
    (error,) = raised.value.exceptions
    assert isinstance(error, LogprobMismatch)
    assert f"{abs(drift):.2g} apart on average, where rollout.max_logprob_diff allows {allowed}; likely causes:" in str(
        error
    )
    assert str(error).count("\n  - ") == 3
    assert stage.did == []


@pytest.mark.parametrize(("drift", "dtype"), [(0.0005, "float32"), (0.05, "bfloat16")])
def test_rounding_does_not(tmp_path: Path, drift: float, dtype: str) -> None:
    stage = Stage([GOOD] * 3, drift)
    asyncio.run(train(stage, tmp_path, f"actor.dtype={dtype}"))
    assert "train 2" in stage.did


def test_batches_are_built_while_the_event_loop_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building waits for something that only the loop does."""
    built, ticked = step_module.policy_batches, threading.Event()

    def build(*arguments):
        assert ticked.wait(HUNG_S)
        return built(*arguments)

    async def run() -> None:
        asyncio.get_running_loop().call_later(0.1, ticked.set)
        await run_well(tmp_path)

    monkeypatch.setattr(step_module, "policy_batches", build)
    asyncio.run(run())


@pytest.mark.parametrize(
    ("overrides", "batches"),
    [
        (["actor.ppo_n_minibatches=2"], ["current", "proximal"]),
        (["actor.ppo_n_minibatches=2", "actor.ppo_epochs=2"], ["proximal"] * 4),
        (["actor.ppo_epochs=3"], ["proximal"] * 3),
        (["actor.turns_per_minibatch=1"], ["current", "proximal"]),
        (["actor.turns_per_minibatch=9"], ["current"]),
        (["actor.turns_per_minibatch=1", "actor.ppo_epochs=2"], ["proximal"] * 4),
    ],
)
def test_a_step_has_an_optimizer_step_per_mini_batch_and_epoch(
    tmp_path: Path, overrides: list[str], batches: list[str]
) -> None:
    """Mini-batches that are trained after another one have the log-probs of the start of the step."""

    class Seen(Stage):
        async def train(self, batch: Batch, loss: LossSpec, temperature: float) -> dict[str, float]:
            seen.append("proximal" if "proximal_logprobs" in batch.fields else "current")
            return await super().train(batch, loss, temperature)

    seen: list[str] = []
    asyncio.run(train(Seen([GOOD]), tmp_path, "actor.use_decoupled_loss=true", *overrides, steps=1))
    assert seen == batches


def test_groups_that_were_dropped_are_counted_by_step(tmp_path: Path) -> None:
    async def run() -> Notes:
        stage = Stage([GOOD] * 3)
        stage.dropped = [5, 0, 0]
        return await train(stage, tmp_path, "algorithm=dapo")

    record = asyncio.run(run())
    assert [record.scalars[step]["rollout/dropped_groups"] for step in range(1, 4)] == [5, 0, 0]
    assert "rollout/dropped_groups" not in asyncio.run(run_well(tmp_path)).scalars[1]


def test_statistics_of_optimizer_steps_are_averaged_over_tokens_or_steps_and_tokens_are_counted() -> None:
    """10 tokens, all on policy, then 30, a third of them: 20 are on policy, and 10 * 1 + 30 * 0.2 apart in all."""
    steps = [
        {"loss": 1.0, "loss_tokens": 10.0, "on_policy_share": 1.0, "on_policy_logprob_diff": 1.0, "kl": 1.0},
        {
            "loss": 3.0,
            "kl": 3.0,
            "loss_tokens": 30.0,
            "on_policy_share": 1 / 3,
            "on_policy_logprob_diff": 0.2,
            "skipped": 1.0,
        },
    ]
    result = mean(steps)
    assert (result["loss"], result["kl"]) == pytest.approx((2.0, 2.5))
    assert result["on_policy_share"] == pytest.approx(0.5)
    assert result["logprob_diff"] == pytest.approx(0.8)
    assert result["skipped"] == 1
    assert result["loss_tokens"] == 40
    assert mean([{"loss": 1.0}]) == {"loss": 1.0}


def test_the_reward_of_a_step_counts_an_episode_once():
    arrays = np.arange(2), np.zeros(2), np.array([-1, 0])
    told = [
        Trajectory(0, group, *arrays, FinishReason.STOP, reward=reward, sample=sample)
        for group, sample, reward in [(0, 0, 1.0), (0, 0, 1.0), (0, 0, 1.0), (0, 1, 0.0), (1, 0, 0.0), (1, 1, None)]
    ]
    assert describe(told, version=0)["reward"] == pytest.approx(1 / 3)


def test_parts_of_rewards_are_described_by_name():
    first, *others = [
        Trajectory(
            0, 0, np.arange(2), np.zeros(2), np.array([-1, 0]), FinishReason.STOP, reward=1.0, reward_parts=parts
        )
        for parts in ({"right": 1.0, "short": 0.5, "loss_tokens": 0.0, "on_policy_share": 0.5}, {"right": 0.0})
    ]
    described = describe([first, *others], version=0)
    assert {tag: value for tag, value in described.items() if tag.startswith("reward_parts/")} == {
        "reward_parts/right": 0.5,
        "reward_parts/short": 0.5,
        "reward_parts/loss_tokens": 0.0,  # a name of the user's, whatever the trainer calls so
        "reward_parts/on_policy_share": 0.5,
    }
