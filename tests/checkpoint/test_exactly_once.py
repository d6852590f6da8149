"""Wherever a run is stopped, and however often: every group is trained in exactly one committed step."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import HUNG_S

from areal_like.core.algorithms.presets import make_algorithm
from areal_like.core.checkpoint.journal import Journal, Step, read_header
from areal_like.core.checkpoint.store import DIRECTORY, JOURNAL, newest
from areal_like.core.config.load import load
from areal_like.core.errors import DirectoryTaken
from areal_like.core.loop.evaluation import Evaluator
from areal_like.core.loop.loop import Parts, reinforce
from areal_like.core.loop.policies import Policy
from areal_like.core.loop.prompt_results import PromptResults, prompt_keys
from areal_like.core.rollout.admission import Admission
from areal_like.core.rollout.collector import Collector
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.types import Batch, FinishReason, LossSpec, Prompt, Trajectory
from areal_like.metrics.console import View
from areal_like.metrics.record import Record
from areal_like.run.directory import RunDirectory, run_directory

pytestmark = pytest.mark.covers("resume after SIGKILL")

CONFIG = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
PROMPTS = [Prompt(row, [row]) for row in range(7)]


class Crash(RuntimeError):
    """The machine stops: from here on nothing is done any more."""


class Machine:
    """Stops after so many things that it does, in the middle of one; `None`: never."""

    def __init__(self, lasts: int | None, seed: int) -> None:
        self._left, self.random = lasts, random.Random(seed)

    def does(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Crash

    @contextmanager
    def disk(self) -> Iterator[None]:
        """What is written may be half there when the machine stops."""
        fsync, rename, replace = os.fsync, Path.rename, Path.replace

        def sync(descriptor: int) -> None:
            try:
                self.does()
            except Crash:
                with suppress(OSError):  # a directory
                    os.ftruncate(descriptor, max(0, os.fstat(descriptor).st_size - self.random.randrange(8)))
                raise
            fsync(descriptor)

        def renamed(way: Callable[..., Path]) -> Callable[..., Path]:
            def move(path: Path, target: Path) -> Path:
                self.does()
                return way(path, target)

            return move

        with (
            mock.patch.object(os, "fsync", sync),
            mock.patch.object(Path, "rename", renamed(rename)),
            mock.patch.object(Path, "replace", renamed(replace)),
        ):
            yield


class Fakes:
    """Trainer, way of weights and rewards; `steps` is what the trainer has learnt."""

    def __init__(self, machine: Machine, version: int) -> None:
        self._machine, self.steps, self.published = machine, 0, version
        self._saving: tuple[Path, int] | None = None

    async def _work(self) -> None:
        for _ in range(self._machine.random.randrange(4)):
            await asyncio.sleep(0)
        self._machine.does()

    async def train(self, batch: Batch, loss: LossSpec, temperature: float) -> dict[str, float]:
        await self._work()
        self.steps += 1
        return {"loss": 0.5, "loss_tokens": 4.0}

    async def log_probs(self, batch: Batch, temperature: float) -> np.ndarray:
        return np.full(len(batch.tokens), -1, np.float32)

    async def save(self, path: Path) -> None:
        await self._work()
        self._saving = path, self.steps

    async def finish_save(self, timeout_s: float) -> None:
        path, steps = cast(Any, self._saving)
        path.mkdir()
        await self._work()
        (path / "weights").write_text(str(steps))

    def load(self, path: Path) -> None:
        self.steps = int((path / "weights").read_text())

    async def save_hf(self, path: Path) -> None:
        await self._work()

    async def send(self, version: int, deadline: Deadline) -> None:
        await self._work()
        self.published = version

    def statistics(self) -> dict[str, float]:
        return {}


async def attempt(
    machine: Machine, folder: Path, steps: int, every: int, staleness: int, drops: bool, chooses: bool
) -> None:
    """The run from where it stands, until it is done or the machine stops."""
    recover = ("recover.mode=auto", "recover.restart=true", f"recover.freq_steps={every}", "recover.freq_secs=null")
    others = (
        "train_dataset.batch_size=2",
        "actor.ppo_n_minibatches=1",
        "warm_start=null",
        "stats_logger.console=false",
    )
    fixed = ("trial_name=t", f"cluster.fileroot={folder}", "stats_logger.tensorboard=false")
    config = load(CONFIG, [*recover, *others, *fixed]).config
    job = cast(Any, SimpleNamespace(config=config, train_prompts=PROMPTS))
    async with (
        asyncio.timeout(HUNG_S),
        run_directory(job, View(enabled=False), lambda _: Record(config.run_dir, "t", View(enabled=False))) as opened,
    ):
        state = opened.state
        fakes = Fakes(machine, state.version)
        if opened.checkpoint:
            fakes.load(opened.checkpoint.path / "actor")
        assert fakes.steps == state.version
        async with asyncio.TaskGroup() as tasks:
            made = parts(opened, fakes, machine, tasks, config, steps, staleness, drops, chooses)
            await reinforce(config, made, steps, opened.record, state if opened.checkpoint else None)
        assert fakes.steps == steps
        assert list(opened.record.state(steps)["rewards"]) == list(range(1, steps + 1))


def results_after(journal: list[Step], version: int, staleness: int) -> PromptResults:
    """A curriculum of blocks of 2 that has observed the steps of a journal."""
    from areal_like.capabilities.curriculum.schema import CurriculumConfig
    from areal_like.capabilities.curriculum.stream import Curriculum

    section, keys = CurriculumConfig(revisit=0.2), prompt_keys(PROMPTS)
    stream = Curriculum(PROMPTS, shuffle=True, seed=3, config=section, keys=keys, block=2, ahead=staleness)
    results = PromptResults(stream)
    results.resume(journal, version)
    return results


def parts(
    opened: RunDirectory,
    fakes: Fakes,
    machine: Machine,
    tasks: asyncio.TaskGroup,
    config,
    steps,
    staleness,
    drops,
    chooses,
) -> Parts:
    async def workflow(prompt: Prompt, group_id: int) -> list[Trajectory]:
        for _ in range(machine.random.choice([0, 1, 2, 30])):
            await asyncio.sleep(0)
        machine.does()
        made, logprobs = np.array([-1, fakes.published, fakes.published]), np.array([0, -1, -1], np.float32)
        tokens = np.arange(3, dtype=np.int32)
        return [
            Trajectory(prompt.sample_id, group_id, tokens, logprobs, made.astype(np.int32), FinishReason.STOP, reward)
            for reward in ((0.0, 1.0) if prompt.sample_id % 2 else (1.0, 1.0))
        ]

    state = opened.state
    results = results_after(opened.journal.steps(), state.version, staleness) if chooses and opened.journal else None
    collector = Collector(
        prompts=results.stream if results else PromptStream(PROMPTS, shuffle=True, seed=3),
        groups=steps * 2,
        workflow=workflow,
        admission=Admission(2, staleness, state.version),
        max_groups=None,
        tasks=tasks,
        keeps=(lambda group: group[0].group_id % 4 != 1) if drops else None,
        max_drops=9,
        again=state.untrained,
        started=state.started,
        dropped=state.count_dropped(2),
        tokens_generated=state.tokens_generated,
        **({"note_drop": results.note_drop} if results else {}),
    )
    fake = cast(Any, fakes)
    recovery = opened.recovery(config, {"actor": fake})
    evaluator = Evaluator(config.evaluator, {})
    policy = Policy("", config, make_algorithm(config), fake, fake)
    return Parts({"": policy}, fake, collector, evaluator, recovery=recovery, results=results)


def journal_of(run: Path) -> list[Step]:
    file = run / DIRECTORY / JOURNAL
    return Journal(file, read_header(file)["data"]).steps() if file.exists() else []


@settings(max_examples=15)
@given(
    lasting=st.lists(st.integers(0, 60), max_size=6),
    steps=st.integers(1, 7),
    every=st.integers(1, 3),
    staleness=st.integers(0, 2),
    drops=st.booleans(),
    chooses=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_every_group_is_trained_in_exactly_one_committed_step(
    lasting, steps, every, staleness, drops, chooses, seed
) -> None:
    with TemporaryDirectory() as folder:
        run = Path(folder) / "gsm8k-grpo-cpu/t"
        for number, lasts in enumerate([*lasting, None]):
            machine, crashed = Machine(lasts, seed + number), False
            with machine.disk():
                try:
                    asyncio.run(attempt(machine, Path(folder), steps, every, staleness, drops, chooses))
                except* Crash:
                    crashed = True
            checkpoint, complaints = newest(run / DIRECTORY)
            committed = checkpoint.state if checkpoint else None
            made = journal_of(run)
            assert complaints == []
            assert [step.version for step in made] == list(range(1, len(made) + 1))
            if committed:
                kept = [group for step in made[: committed.version] for group in step.groups]
                others = set(range(committed.started)) - {*kept, *committed.untrained}
                assert len(kept) == 2 * committed.version == len(set(kept)) <= 2 * len(made)
                assert set(kept).isdisjoint(committed.untrained)
                assert drops or not others
                assert all(group % 4 == 1 for group in others)
            if not crashed:
                break
        assert committed.version == steps == len(made)
        trained = sorted(group for step in made for group in step.groups)
        assert drops or trained == list(range(2 * steps))
        plain = PromptStream(PROMPTS, shuffle=True, seed=3)
        stream = results_after(made, steps, staleness).stream if chooses else plain
        assert all(stream[group].sample_id == row for s in made for group, row in zip(s.groups, s.samples, strict=True))
        assert len(list((run / DIRECTORY).glob("step-*"))) <= 2
        assert not list((run / DIRECTORY).glob(".step-*"))


def test_without_checkpoints_a_directory_is_not_entered_again(tmp_path: Path) -> None:
    keys = ["trial_name=t", f"cluster.fileroot={tmp_path}", "recover.mode=off"]
    job = cast(Any, SimpleNamespace(config=load(CONFIG, keys).config))

    async def enter() -> None:
        async with run_directory(
            job, View(enabled=False), lambda _: Record(job.config.run_dir, "t", View(enabled=False))
        ):
            pass

    asyncio.run(enter())
    with pytest.raises(DirectoryTaken, match="belongs to a run that started at the same time"):
        asyncio.run(enter())
