"""Evaluation: when evaluation prompts are answered, and the statistics of the responses."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from areal_like.core.config.schema import EvaluatorConfig
from areal_like.core.events import span
from areal_like.core.types import Prompt, Trajectory, Workflow, generated_in


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts, and the workflow that gives `n_samples` trajectories for each."""

    prompts: Sequence[Prompt]
    workflow: Workflow
    n_samples: int


@dataclass(frozen=True)
class SetResult:
    """Result of one set: `mean` is mean@n, `pass_at` has pass@k by k, `trajectories` are all of them.

    `mean` is None where not a single response was judged.
    """

    n_samples: int
    mean: float | None
    pass_at: Mapping[int, float]
    trajectories: Sequence[Trajectory]

    def scalars(self) -> dict[str, float]:
        """Return the numbers under the names that papers give them; {} where there is none."""
        if self.mean is None:
            return {}
        return {f"mean@{self.n_samples}": self.mean} | {f"pass@{k}": share for k, share in self.pass_at.items()}


@dataclass(eq=False)
class Evaluator:
    """The sets of a run by name; `tokens` counts their generated tokens."""

    config: EvaluatorConfig
    sets: Mapping[str, EvaluationSet]
    tokens: int = field(default=0, init=False)

    def due(self, done: int, steps: int) -> bool:
        """Return whether to evaluate after `done` of `steps` training steps."""
        if not self.sets:
            return False
        if done in (0, steps):
            return self.config.at_start if done == 0 else self.config.at_end
        return self.config.freq_steps is not None and done % self.config.freq_steps == 0

    async def evaluate(self) -> dict[str, SetResult]:
        """Evaluate every set with the servers' present weights."""
        results = await asyncio.gather(*(self._evaluate(name, part) for name, part in self.sets.items()))
        return dict(zip(self.sets, results, strict=True))

    async def _evaluate(self, name: str, part: EvaluationSet) -> SetResult:
        numbers = range(-len(part.prompts), 0)  # of groups: smaller than any that is trained, and so served first
        with span("evaluation", name):
            groups = await asyncio.gather(*map(part.workflow, part.prompts, numbers))
        rewards = [_of_samples(group) for group in groups]
        trajectories = [item for group in groups for item in group]
        generated = await asyncio.to_thread(generated_in, trajectories)
        self.tokens += generated  # read after the wait: other sets count meanwhile
        judged = [values for values in rewards if values]
        if not judged:
            return SetResult(part.n_samples, None, {}, trajectories)
        passed = [(len(values), sum(value >= self.config.pass_reward for value in values)) for values in judged]
        mean = float(np.mean([np.mean(values) for values in judged]))
        return SetResult(part.n_samples, mean, pass_at(passed, part.n_samples), trajectories)


def _of_samples(group: Sequence[Trajectory]) -> list[float]:
    """Return the rewards of a group's samples, some may have several trajectories."""
    return list({item.sample: item.reward for item in group if item.reward is not None}.values())


def pass_at(counts: Sequence[tuple[int, int]], n_samples: int) -> dict[int, float]:
    """Return pass@k for k = 1, 2, 4, ... up to `n_samples`, of prompts with (responses, responses that passed).

    The unbiased estimate 1 - C(n - c, k) / C(n, k), averaged over prompts (Chen et al. 2021, "Evaluating Large Language
    Models Trained on Code", arXiv:2107.03374, equation 1). A prompt with fewer than k rewards does not count at k.
    """
    shares = {}
    for k in sorted({*(2**power for power in range(n_samples.bit_length())), n_samples}):
        known = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k]
        if known:
            shares[k] = float(np.mean(known))
    return shares
