"""The commands `areal-like replay` and `areal-like diff`: they return a verdict, and the table behind it."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_like.capabilities.replay.audit import audit_run, audit_steps
from areal_like.capabilities.replay.comparison import EXACT, Bounds, Quantity, compare, first_difference, rounding
from areal_like.capabilities.replay.evaluation import PromptRewards, check_evaluation, describe_rewards, evaluate
from areal_like.capabilities.replay.log_prob_check import LogProbCheck
from areal_like.capabilities.replay.rank import name_weights
from areal_like.capabilities.replay.reader import RecordedRun, open_run
from areal_like.capabilities.replay.recorder import measure
from areal_like.capabilities.replay.replayer import Keep, Replay, ReplayStart, find_place, replay_to, start_trainers
from areal_like.capabilities.replay.settings import (
    check_overrides,
    compare_settings,
    is_in_place,
    make_job,
    may_change,
    read_config,
    same_layout,
)
from areal_like.core.checkpoint.journal import RunState
from areal_like.core.checkpoint.store import Checkpoint
from areal_like.core.errors import CheckpointError
from areal_like.core.types import Floats
from areal_like.job import Job
from areal_like.run.startup import saved_trainers

SAVE_S = 1800.0


@dataclass(frozen=True)
class ReplayVerdict:
    """The result of a command: one sentence, whether it is good, and a table and further lines below it."""

    text: str
    good: bool
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    warnings: Sequence[str] = ()
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class ReplayRequest:
    """A request to replay the steps from `first` to `last`, and to evaluate the last weights if `evaluates`.

    `layout` are overrides that leave a step's training unchanged, `changes` overrides that change it.
    """

    run: RecordedRun
    first: int
    last: int
    layout: Sequence[str]
    changes: Sequence[str]
    say: Callable[[str], None]
    evaluates: bool = False


def ask(
    path: Path,
    first: int,
    last: int,
    overrides: Sequence[str],
    say: Callable[[str], None],
    *,
    evaluates: bool = False,
) -> ReplayRequest:
    """Return a request. Raises CheckpointError if the run does not have the steps."""
    run = open_run(path)
    for number in range(first, last + 1):
        run.describe(number)
    check_overrides(overrides, evaluates=evaluates)
    layout = [text for text in overrides if may_change(text)]
    return ReplayRequest(run, first, last, layout, [text for text in overrides if text not in layout], say, evaluates)


def audit(path: Path) -> ReplayVerdict:
    """Return the faults of all recorded steps and checkpoints, which need no computation."""
    run = open_run(path)
    if not run.steps:
        run.step(1)
    faults = list(audit_run(run, read_config(run), run.steps))
    text = f"{len(run.steps)} recorded steps have no fault" if not faults else f"{len(faults)} faults: {faults[0]}"
    return ReplayVerdict(text, not faults, ("fault",), [(fault,) for fault in faults])


async def verify(asked: ReplayRequest, *, log_probs: bool = False) -> ReplayVerdict:
    """Compute steps again and compare them with the record, with `log_probs` also every token's."""
    run, config = asked.run, read_config(asked.run)
    staleness = int(config["rollout"]["max_head_offpolicyness"])
    # tokens are scored with the weights of their versions, so the replay passes the oldest of them
    place = find_place(run, max(1, asked.first - staleness) if log_probs else asked.first)
    between = [run.describe(number) for number in range(place.version + 1, asked.last + 1)]
    faults = list(audit_steps(run, config, [each["step"] for each in between]))
    with _scratch(run) as scratch:
        job = make_job(run, asked.layout, scratch, int(between[-1]["total_steps"]))
        warnings = compare_settings(between, job)
        bounds = _bounds(job, len(between)) if asked.layout or not same_layout(between, job) else EXACT
        asked.say(f"replaying steps {place.version + 1} to {asked.last} from {place}")
        found: list[tuple[int, list[Quantity]]] = []
        check = LogProbCheck(run, asked.first, asked.last, staleness, is_in_place(job.config))
        async with start_trainers(job, run, place, scratch) as replay:
            if bounds.exact:
                await _check_loaded(replay, run, place)
            while replay.version < asked.last:
                if log_probs:
                    await check.measure(replay)
                recorded = run.step(replay.version + 1).file
                found.append((recorded.step, compare(recorded, await replay.step(recorded), bounds)))
                asked.say(f"step {recorded.step}: {_agreement(found[-1][1], bounds)}")
    return _verdict(found, place, bounds, [*warnings, *place.damaged], [*faults, *check.faults()])


def _bounds(job: Job, steps: int) -> Bounds:
    spec = job.models.get("actor")
    return rounding(spec.layers if spec else 1, job.config.actor.dtype, steps)


def _agreement(quantities: list[Quantity], bounds: Bounds) -> str:
    first = first_difference(quantities)
    return str(first) if first else "the same bits" if bounds.exact else "within rounding"


def _verdict(
    found: list[tuple[int, list[Quantity]]], place: ReplayStart, bounds: Bounds, warnings: list[str], faults: list[str]
) -> ReplayVerdict:
    """Return the verdict on replayed steps; faults in the record come first, as they explain differences."""
    last, quantities = found[-1]
    span = f"step {last}" if len(found) == 1 else f"steps {found[0][0]} to {last}"
    part = next(((step, each) for step, own in found if (each := first_difference(own))), None)
    if faults:
        text = faults[0]
    elif part is None and bounds.exact:
        text = (
            f"equal: {span}, computed again from {place}, has the same bits in weights, optimizer state and statistics"
        )
    elif part is None:
        text = f"equal up to rounding: {span}, computed again from {place}, is within {bounds.relative:.1e}"
    else:
        text = f"different: {span} from {place} first differs at step {part[0]} in {part[1]}"
    if part:
        quantities = dict(found)[part[0]]
    rows = [_row(each) for each in quantities]
    columns = ("quantity", "recorded", "replayed", "distance", "verdict")
    return ReplayVerdict(text, part is None and not faults, columns, rows, [*warnings, *faults[1:]])


def _row(each: Quantity) -> tuple[str, ...]:
    distance = "" if each.distance is None else f"{each.distance:.3g}"
    return each.name, each.recorded, each.found, distance, "agrees" if each.agrees else "differs"


async def _check_loaded(replay: Replay, run: RecordedRun, place: ReplayStart) -> None:
    """Compare the loaded checkpoint with the state that the run had; raise CheckpointError, which names the tensor."""
    if place.version not in run.steps or place.checkpoint is None:
        return
    recorded = run.step(place.version).file.states()
    states, _ = await measure(replay.trainers)
    for role, trainer in replay.trainers.items():
        for rank, part, number in _find_changed(recorded.get(role, []), states[role]):
            names = (await trainer.apply(name_weights, phase="names"))[rank]
            which = names[number] if part == "params" else f"optimizer state {number}"
            raise CheckpointError(
                f"{place} is damaged: {which} of {role} rank {rank} differs from the state of the run after step "
                f"{place.version}. Restore it from a backup, or move it away: an earlier one is used then"
            )


def _find_changed(recorded: Any, loaded: Any) -> Iterator[tuple[int, str, int]]:
    """Yield rank, part and number of each tensor with another digest."""
    for rank, (own, other) in enumerate(zip(recorded, loaded, strict=False)):
        for part, digests in own.items():
            for number, (one, two) in enumerate(zip(digests, other[part], strict=False)):
                if one != two:
                    yield rank, part, number


async def counterfactual(asked: ReplayRequest, max_staleness: int | None) -> ReplayVerdict:
    """Train recorded steps with other settings; report where the two runs part."""
    run, changes = asked.run, asked.changes
    place = find_place(run, asked.first)
    total = int(run.describe(asked.last)["total_steps"])
    with _scratch(run) as scratch:
        base = make_job(run, asked.layout, scratch, total)
        other = make_job(run, [*asked.layout, *changes], scratch, total)
        if asked.evaluates:
            check_evaluation(base)
        asked.say(f"training steps {asked.first} to {asked.last} as the run did, from {place}")
        async with start_trainers(base, run, place, scratch, evaluates=asked.evaluates) as replay:
            async for _ in replay_to(replay, run, asked.first - 1):
                pass
            start = await _save(replay, scratch / "start")
            ours = [each async for each in _train(replay, run, asked.last)]
            rewards = await _evaluate(asked, replay, scratch)
        asked.say(f"training them with {' '.join(changes) or f'samples up to {max_staleness} versions old'}")
        async with start_trainers(other, run, start, scratch, evaluates=asked.evaluates) as replay:
            theirs = [each async for each in _train(replay, run, asked.last, _younger(max_staleness))]
            changed = await _evaluate(asked, replay, scratch)
    parting = _parting(ours, theirs, _bounds(other, asked.last - asked.first + 1))
    return replace(parting, lines=list(describe_rewards(rewards, changed, asked.last)))


async def _evaluate(asked: ReplayRequest, replay: Replay, scratch: Path) -> Mapping[str, PromptRewards]:
    """Return the rewards of each evaluation set with the present weights, {} if they are not asked for."""
    if not asked.evaluates:
        return {}
    asked.say(f"evaluating the weights after step {replay.version}")
    return await evaluate(replay, scratch / "logs")


def _younger(max_staleness: int | None) -> Keep:
    return lambda item, version: max_staleness is None or version - item.oldest_version <= max_staleness


@dataclass(frozen=True)
class Trained:
    """A step that was trained, and log-probs of the recorded trajectories' generated tokens after it."""

    step: int
    statistics: Mapping[str, float]
    states: Any
    log_probs: Floats


async def _train(
    replay: Replay, run: RecordedRun, last: int, keep: Keep = lambda item, version: True
) -> AsyncIterator[Trained]:
    replay.keep = keep
    async for recorded, trained in replay_to(replay, run, last):
        trajectories = recorded.trajectories()
        generated = np.concatenate([item.generated for item in trajectories])
        log_probs = (await replay.log_probs(trajectories))[generated]
        yield Trained(recorded.step, trained.statistics, trained.states(), log_probs)


async def _save(replay: Replay, path: Path) -> ReplayStart:
    """Save the trainers; return the place to start from."""
    for role, trainer in saved_trainers(replay.job.config, replay.trainers).items():
        path.mkdir(exist_ok=True)
        await trainer.save(path / role)
        await trainer.finish_save(SAVE_S)
    return ReplayStart(replay.version, Checkpoint(path, RunState(replay.version)))


SHOWN = ("loss", "grad_norm")


def _parting(ours: list[Trained], theirs: list[Trained], bounds: Bounds) -> ReplayVerdict:
    """Return where two trainings of the same steps part, and by how much at each step."""
    rows, parted = [], ""
    for one, other in zip(ours, theirs, strict=True):
        values = [f"{each.statistics.get(name, math.nan):.6g}" for name in SHOWN for each in (one, other)]
        rows.append([str(one.step), *values, f"{divergence(one, other):.3g}"])
        parted = parted or _find_parting(one, other, bounds)
    text = "equal bits: the settings change nothing"
    if parted:
        text = f"{parted}; after step {ours[-1].step} their KL divergence is {divergence(ours[-1], theirs[-1]):.3g}"
    columns = ["step", *(f"{name}{which}" for name in SHOWN for which in ("", " (changed)")), "KL"]
    return ReplayVerdict(text, good=True, columns=columns, rows=rows)


def _find_parting(one: Trained, other: Trained, bounds: Bounds) -> str:
    """Return the first quantity in which a step differs, in words, "" if its weights have the same bits."""
    own, changed = one.statistics, other.statistics
    for name in dict.fromkeys((*SHOWN, *own, *changed)):
        before, after = own.get(name), changed.get(name)
        if before != after:
            rounds = None not in (before, after) and bounds.allow(abs(own[name] - changed[name]), abs(own[name]))
            how = ", no more than rounding" if rounds else ""
            return f"the runs part at step {one.step}, first in {name} ({before} against {after}{how})"
    return "" if one.states == other.states else f"the runs part at step {one.step}, in the weights"


def divergence(one: Trained, other: Trained) -> float:
    """Return an estimate of the KL divergence of the changed policy from the run's, on the recorded tokens.

    It is the mean of r - 1 - log r with r the ratio of probabilities (Schulman 2020, k3).
    """
    ratio = (other.log_probs - one.log_probs).astype(np.float64)
    return float(np.mean(np.expm1(ratio) - ratio)) if len(ratio) else 0.0


def compare_runs(one: Path, other: Path) -> ReplayVerdict:
    """Return the first step and the first quantity in which two runs differ."""
    runs = [open_run(path) for path in (one, other)]
    common = [step for step in runs[0].steps if step in runs[1].steps]
    if not common:
        for run in runs:
            run.step(1)
        raise CheckpointError(f"{one} and {other} have no recorded step in common")
    for number in common:
        quantities = compare(runs[0].step(number).file, runs[1].step(number).file)
        if first := first_difference(quantities):
            text = f"the runs first differ at step {number} in {first}"
            columns = ("quantity", str(one), str(other), "distance", "verdict")
            return ReplayVerdict(text, good=False, columns=columns, rows=[_row(each) for each in quantities])
    lengths = f" (of {len(runs[0].steps)} and {len(runs[1].steps)})" if runs[0].steps != runs[1].steps else ""
    return ReplayVerdict(f"equal: {len(common)} common recorded steps{lengths} have the same bits", good=True)


@contextmanager
def _scratch(run: RecordedRun) -> Iterator[Path]:
    """Yield a directory in the run's for logs and checkpoints of a replay; its logs stay if the replay fails."""
    place = run.path if os.access(run.path, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix=".replay-", dir=place)).absolute()
    try:
        yield path
    except BaseException as error:
        if (path / "logs").exists():
            error.add_note(f"The output of the replay's processes is in {path / 'logs'}.")
        else:
            shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)
