"""Lines on the console about a run that goes wrong, with the cause and the section of docs/operations.md about it."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import fsum
from operator import mul
from statistics import mean
from typing import NamedTuple

from areal_like.capabilities.operations.advice import GpuSplit, better

REPEAT_S = 600.0  # at least, between two lines about the same
WINDOW = 40  # steps that a rule sees
FEW = 5  # steps whose mean stands for the first or the last ones
LEAST = 4 * FEW  # steps before a trend is judged
COLLAPSED, SOLVED = 0.1, 0.9  # share of the first steps' entropy; mean reward above which entropy may vanish
IDLE_STEPS = 10  # whose idle times are compared with other layouts
LONGER, TIED, FLAT = 1.2, 0.5, 0.01  # growth of responses, correlation with the reward, change of evaluation rewards
STUCK_S, STUCK_STEPS = 600.0, 10  # age of a group, at least, and in steps

Scalars = Mapping[str, float]


class Alert(NamedTuple):
    """A fault of a run: its section in docs/operations.md, and a sentence with its cause and the key to change."""

    kind: str
    text: str


@dataclass(eq=False)
class Console:
    """Reports alerts through `say`, each kind at most once in REPEAT_S seconds."""

    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _said: dict[str, float] = field(default_factory=dict, init=False)

    def report(self, step: int, alert: Alert | None) -> None:
        """Report an alert, unless there is none or it was reported recently."""
        if alert is None or self.clock() - self._said.get(alert.kind, -REPEAT_S) < REPEAT_S:
            return
        self._said[alert.kind] = self.clock()
        self.say(f"step {step}: {alert.text} (docs/operations.md#{alert.kind})")


@dataclass(eq=False)
class Trends:
    """The rules about several steps. `max_logprob_diff` is the largest distance that rounding explains.

    `layout` has the GPUs of trainer and servers if they are separate.
    """

    max_logprob_diff: float
    layout: GpuSplit | None = None
    evaluations: Callable[[], Mapping[int, float]] = dict  # reward by step
    _first_entropy: list[float] = field(default_factory=list, init=False)
    _steps: deque[Scalars] = field(default_factory=lambda: deque(maxlen=WINDOW), init=False)

    def look(self, step: int, scalars: Scalars) -> list[Alert]:
        """Add the metrics of a step; return the alerts that hold now."""
        self._steps.append(scalars)
        entropy = scalars.get("train/entropy")
        if entropy is not None and len(self._first_entropy) < FEW:
            self._first_entropy.append(entropy)
        rules = (self._entropy, self._drift, self._idle, lambda: self._length(step), self._stuck)
        return [alert for rule in rules if (alert := rule()) is not None]

    def _series(self, name: str) -> list[float]:
        return [each[name] for each in self._steps if name in each]

    def _entropy(self) -> Alert | None:
        entropy, reward = self._series("train/entropy"), self._series("reward/mean")
        if len(entropy) < LEAST or not reward:
            return None
        before, now = mean(self._first_entropy), mean(entropy[-FEW:])
        if now > COLLAPSED * before or mean(reward[-FEW:]) > SOLVED:
            return None
        cause = "samples of a group become equal, so advantages vanish"
        fix = "Raise gconfig.temperature or actor.eps_clip_higher, or lower actor.optimizer.lr"
        return Alert("entropy-collapse", f"entropy fell from {before:.3g} to {now:.3g}: {cause}. {fix}")

    def _drift(self) -> Alert | None:
        distance = self._series("rollout/logprob_diff_server_trainer")[-FEW:]
        if len(distance) < FEW or min(distance) <= self.max_logprob_diff:
            return None
        cause = f"rounding explains {self.max_logprob_diff:.3g}, so servers and trainer compute different models"
        fix = "Set rollout.drift_probe_tokens to find the server, or raise rollout.max_logprob_diff"
        return Alert("drift", f"log-probs of servers and trainer differ by {mean(distance):.3g}: {cause}. {fix}")

    def _idle(self) -> Alert | None:
        idle, trainer, seconds = map(self._series, ("idle/servers", "idle/trainer", "seconds/step"))
        if self.layout is None or min(map(len, (idle, trainer))) < IDLE_STEPS + 1:  # the first step warms up
            return None
        late = seconds[-IDLE_STEPS:]
        servers, trainers = (fsum(map(mul, late, each[-IDLE_STEPS:])) / fsum(late) for each in (idle, trainer))
        slowest = max(self._series("rollout/longest_seconds")[-IDLE_STEPS:], default=0.0)
        text = better(self.layout, mean(late), servers, trainers, slowest)
        return Alert("idle-servers" if servers > trainers else "idle-trainer", text) if text else None

    def _length(self, step: int) -> Alert | None:
        names = ("reward/mean", "rollout/response_length", "rollout/reward_length_correlation")
        reward, length, tied = map(self._series, names)
        if min(map(len, (reward, length, tied))) < LEAST:
            return None
        grows = mean(length[-FEW:]) > LONGER * mean(length[:FEW])
        rises = mean(reward[-FEW:]) - mean(reward[:FEW]) > FLAT
        recent = [reward for at, reward in sorted(self.evaluations().items()) if at > step - len(self._steps)]
        better = len(recent) > 1 and recent[-1] > recent[0] + FLAT
        if not grows or not rises or mean(tied) < TIED or better:
            return None
        seen = "evaluation rewards do not rise" if len(recent) > 1 else "no evaluation shows that answers are better"
        cause = f"longer responses of a group have the higher rewards (correlation {mean(tied):.2f}), and {seen}"
        fix = "Check the reward function with `areal-like samples RUN --best 5`, or set actor.overlong_penalty_factor"
        return Alert("reward-by-length", f"the reward rises with the length of responses: {cause}. {fix}")

    def _stuck(self) -> Alert | None:
        ages, seconds = self._series("rollout/oldest_group_seconds"), self._series("seconds/step")
        return stuck(ages[-1], sorted(seconds)[len(seconds) // 2]) if ages and seconds else None


def stuck(age_s: float, step_s: float) -> Alert | None:
    """Return the alert about a group that has run for `age_s` where a step takes `step_s` seconds."""
    if age_s < max(STUCK_S, STUCK_STEPS * step_s):
        return None
    cause = "an episode, its tool or its reward does not end"
    fix = "Set episode.timeout_s or reward.timeout_s, and see logs/workflows.log"
    return Alert("stuck-groups", f"a group has run for {age_s / 60:.0f} min: {cause}. {fix}")
