"""Faults in a recorded run that need no computation to be found, each named with its place."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from areal_like.capabilities.replay.checkpoint_files import check_checkpoint
from areal_like.capabilities.replay.comparison import describe_place, describe_trajectory
from areal_like.capabilities.replay.digests import Digest, bits, digest, find_change
from areal_like.capabilities.replay.reader import RecordedRun
from areal_like.capabilities.replay.step_file import TRAJECTORIES, StepFile
from areal_like.core.checkpoint.journal import Step
from areal_like.core.checkpoint.store import checkpoints
from areal_like.core.errors import CheckpointError


def audit_run(run: RecordedRun, config: Mapping[str, Any], steps: list[int]) -> Iterator[str]:
    """Yield the faults in some recorded steps of a run and in all of its checkpoints."""
    yield from audit_steps(run, config, steps)
    for checkpoint in checkpoints(run.directory):
        try:
            check_checkpoint(checkpoint)
        except CheckpointError as error:
            yield str(error)


def audit_steps(run: RecordedRun, config: Mapping[str, Any], steps: list[int]) -> Iterator[str]:
    """Yield the faults in some recorded steps of a run."""
    lines = {line.version: line for line in run.journal}
    for step in steps:
        try:
            yield from audit_step(run.step(step).file, lines[step], config)
        except CheckpointError as error:
            yield str(error)


def audit_step(step: StepFile, line: Step, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of one step."""
    changed = list(_changes(step))
    yield from changed
    yield from _groups(step, line)
    yield from _seeds(step)
    if not changed:  # each change has a reason of its own
        yield from _versions(step, config)
        yield from _routes(step)


def _changes(step: StepFile) -> Iterator[str]:
    """Yield arrays that changed since they were written; a single changed value is named with its old value."""
    for name, expected in step.about["digests"].items():
        array = step.arrays.get(name)
        if array is None:
            yield f"step {step.step}: {name} is missing in {step.path}"
            continue
        if list(digest(array)) == expected:
            continue
        change = find_change(Digest(*expected), array)
        if change is None:
            yield f"step {step.step}: values of {name} have changed since {step.path} was written"
            continue
        before = array.reshape(-1).copy()
        bits(before)[change.word] = change.recorded
        where = describe_place(step, name, change.place, array)
        bit = "" if change.flipped_bit is None else f", one flipped bit ({change.flipped_bit})"
        found, was = array.reshape(-1)[change.place], before[change.place]
        yield f"step {step.step}: {name} is {found} {where}; the run recorded {was}{bit}"


def _groups(step: StepFile, line: Step) -> Iterator[str]:
    """Yield differences from the journal's groups, and samples that a group lacks; an agent's episode may fail."""
    group_ids, samples = (step.arrays[f"{TRAJECTORIES}{name}"] for name in ("group_id", "sample"))
    for group in line.groups:
        own = {int(sample) for sample in samples[group_ids == group]}
        wanted = range(int(step.about["samples_per_group"]))
        lacking = sorted({*wanted, *range(max(own, default=-1) + 1)} - own)
        if lacking and not step.about["has_workflow"]:
            which = ", ".join(map(str, lacking))
            yield f"step {step.step}: group {group} has {len(own)} of {len(wanted)} samples; missing: sample {which}"
    if others := sorted({int(group) for group in group_ids} - set(line.groups)):
        yield f"step {step.step}: groups {', '.join(map(str, others))} are not in the journal's line of the step"


def _seeds(step: StepFile) -> Iterator[str]:
    """Yield ranks whose random generators began with another seed than the other ranks."""
    for role, seeds in step.about["seeds"].items():
        usual = int(step.about["seed"])
        for rank, seed in enumerate(seeds):
            if seed != usual:
                yield f"step {step.step}: {role} rank {rank} has the seed {seed}, the run's is {usual}"


def _versions(step: StepFile, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield version labels that no server gives: beyond the staleness bound, or older than the token before."""
    versions, lengths = step.arrays[f"{TRAJECTORIES}versions"], step.arrays[f"{TRAJECTORIES}lengths"]
    newest = step.step - 1
    oldest = max(0, newest - int(config["rollout"]["max_head_offpolicyness"]))
    start = 0
    for number, length in enumerate(lengths.tolist()):
        own = versions[start : start + length]
        made = np.flatnonzero(own >= 0)
        labels = own[made]
        wrong = (labels > newest) | (labels < oldest)
        wrong[:-1] |= labels[:-1] > np.minimum.accumulate(labels[::-1])[::-1][1:]  # a later token has older weights
        suspects = made[wrong]
        if len(suspects) > 1 and len(labels) > 2:  # one low label makes all before it suspects
            low = _low_label(labels)
            suspects = made[[low]] if low is not None else suspects
        if len(suspects):
            place = int(suspects[0])
            yield (
                f"step {step.step}: version {int(own[place])} at token {place} of {describe_trajectory(step, number)} "
                f"cannot be right: labels of a response do not decrease, and this step's are {oldest} to {newest}"
            )
        start += length


def _low_label(labels: Any) -> int | None:
    """Return the place of the only label whose removal lets the others ascend, None if there is not one."""
    drops = np.flatnonzero(np.diff(labels) < 0)
    if len(drops) != 1:
        return None
    for place in (int(drops[0]) + 1, int(drops[0])):
        if (np.diff(np.delete(labels, place)) >= 0).all():
            return place
    return None


def _routes(step: StepFile) -> Iterator[str]:
    """Yield tokens whose experts are the same one twice."""
    routes = step.arrays.get(f"{TRAJECTORIES}routes")
    if routes is None or routes.shape[-1] < 2:
        return
    ordered = np.sort(routes, axis=-1)
    unknown = np.iinfo(routes.dtype).max
    twice = ((np.diff(ordered, axis=-1) == 0) & (ordered[..., 1:] != unknown)).any(axis=-1)
    for row, layer in np.argwhere(twice)[:1]:
        where = describe_place(step, f"{TRAJECTORIES}routes", int(row) * routes[0].size, routes)
        yield f"step {step.step}: layer {layer} has the same expert twice {where}: {routes[row, layer].tolist()}"
