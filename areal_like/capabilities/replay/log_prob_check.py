"""Log-probs and version labels of a run, compared with the log-probs under the weights of these versions.

A replay passes every version, so the trainer scores each recorded token with the weights that its label names, and with
the weights of other versions. Few tokens that are far from their own version, where most are near, have a wrong label
if another version gives their log-prob, and a changed log-prob otherwise. A wrong route changes the log-probs of all
tokens after it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from areal_like.capabilities.replay.reader import RecordedRun
from areal_like.capabilities.replay.replayer import Replay
from areal_like.core.columns import all_columns
from areal_like.core.types import Trajectory

OUTLIER = 30.0  # times the median distance, from which on a token is no longer near its version
LEAST = 1e-5  # distance of float32 that kernels cause
SEVERAL = 3  # tokens, most of those up to the end, that a wrong route explains better than their own log-probs
CLEAR = 3.0  # times nearer is the version that a wrongly labelled token has


@dataclass(eq=False)
class LogProbCheck:
    """Distances of the steps from `first` to `last`, by step and version; samples are at most `staleness` old.

    With `in_place` weight updates, tokens behind an update see keys and values of older weights, which the trainer
    cannot compute again, so only the tokens before the first update of a sequence are compared.
    """

    run: RecordedRun
    first: int
    last: int
    staleness: int
    in_place: bool
    _distances: dict[int, dict[int, NDArray[np.float64]]] = field(default_factory=lambda: defaultdict(dict))

    async def measure(self, replay: Replay) -> None:
        """Score the tokens of later steps that the present version may have generated."""
        version = replay.version
        for step in range(max(self.first, version + 1), min(self.last, version + 1 + self.staleness) + 1):
            trajectories = self.run.step(step).file.trajectories()
            scored = (await replay.log_probs(trajectories)).astype(np.float64)
            told = np.concatenate([item.logprobs for item in trajectories])
            self._distances[step][version] = np.abs(scored - told)

    def faults(self) -> Iterator[str]:
        """Yield tokens whose label or log-prob is wrong."""
        for step, by_version in self._distances.items():
            yield from self._of_step(step, self.run.step(step).file.trajectories(), by_version)

    def _of_step(
        self, step: int, trajectories: Sequence[Trajectory], by_version: dict[int, NDArray[np.float64]]
    ) -> Iterator[str]:
        labels = np.concatenate([item.versions for item in trajectories])
        own = np.full(len(labels), np.nan)
        for version, distances in by_version.items():
            own[labels == version] = distances[labels == version]
        if self.in_place:
            own[~np.concatenate([_before_update(item.versions) for item in trajectories])] = np.nan
        known = ~np.isnan(own)
        if not known.any():
            return
        limit = max(LEAST, OUTLIER * float(np.median(own[known])))
        wrong, end = known & (np.nan_to_num(own) > limit), 0
        for number, item in enumerate(trajectories):
            start, end = end, end + len(item.tokens)
            places = (start + np.flatnonzero(wrong[start:end])).tolist()
            if not places:
                continue
            about = f"trajectory {number} (group {item.group_id}, sample {item.sample})"
            nearest = {place: _nearest(by_version, place) for place in places}
            relabelled = {
                place
                for place, version in nearest.items()
                if version != labels[place] and CLEAR * by_version[version][place] < own[place]
            }
            rest = known[places[0] : end].sum()
            inputs = [name for name in item.columns if all_columns()[name].is_input]
            if inputs and not relabelled and len(places) >= SEVERAL and 2 * len(places) > rest:
                token = places[0] - start
                yield (
                    f"step {step}: the {inputs[0]} of token {token - 1} of {about}, or of its prompt, are not those of its "
                    f"generation: log-probs from token {token} on differ by up to {own[places].max():.2g}"
                )
                continue
            for place in places:
                where, label = f"step {step}: token {place - start} of {about}", int(labels[place])
                if place in relabelled:
                    version = nearest[place]
                    yield f"{where} is labelled version {label}, but the weights of version {version} give its log-prob"
                else:
                    other = f", or the {inputs[0]} of token {place - start - 1} are not its" if inputs else ""
                    yield f"{where} has a log-prob that is {own[place]:.2g} from that of its version {label}{other}"


def _before_update(versions: NDArray[np.int32]) -> NDArray[np.bool]:
    """Return the tokens that were generated before the first change of the version in their sequence."""
    made = versions >= 0
    first = versions[made][0] if made.any() else -1
    changed: NDArray[np.bool] = np.logical_or.accumulate(made & (versions != first))
    return ~changed


def _nearest(by_version: Mapping[int, NDArray[np.float64]], place: int) -> int:
    return min(by_version, key=lambda version: float(by_version[version][place]))
