"""A stream that prefers prompts whose success rate is between two bounds."""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_like.capabilities.curriculum.schema import CurriculumConfig, CurriculumKeys
from areal_like.core.config.keys import with_keys
from areal_like.core.loop.prompt_results import PromptValues, prompt_keys
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.types import Ints, Prompt
from areal_like.job import Job


class Curriculum(PromptStream):
    """A PromptStream that skips most prompts that are too easy or too hard for the current policy.

    It goes through the plain stream and skips a row whose mean reward is outside `low` to `high`, except with the
    probability `revisit`. Rows are drawn in blocks, one for each training step. A block is drawn as soon as its groups
    may start: `ahead` steps before the step that trains them, from the results known then. The stream therefore depends
    only on the seed and on the results of each step, not on when groups start. A run that starts more groups to replace
    dropped ones draws further blocks immediately; a resumed run draws them at the same step.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        shuffle: bool,
        seed: int,
        config: CurriculumConfig,
        keys: Ints,
        block: int,
        ahead: int,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(prompts, shuffle=shuffle, seed=seed, weights=weights)
        self._config, self._n_prompts, self._block, self._ahead = config, len(prompts), block, ahead
        self._own_seed = seed
        self._rates = PromptValues(keys, config.decay)
        self._rows = array("q")
        self._cursor = 0  # place in the plain stream
        self._skipped = 0

    @property
    def drawn(self) -> int:
        """Number of blocks drawn so far."""
        return len(self._rows) // self._block

    def row(self, place: int) -> int:
        """Return the row at a place."""
        self.draw_to(place // self._block + 1)
        return self._rows[place]

    def observe(self, rows: Sequence[int], rewards: Sequence[float]) -> None:
        """Record the results of a step."""
        self._rates.observe(rows, rewards)

    def advance(self, version: int) -> None:
        """Draw the blocks that may start at a version, whose results were observed."""
        self.draw_to(version + self._ahead + 1)

    def describe(self) -> dict[str, int]:
        """Return the number of blocks, which a resumed run draws at the same step."""
        return {"drawn": self.drawn}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Draw the blocks that the run had drawn when it described the step."""
        self.draw_to(values.get("drawn", 0))

    def draw_to(self, blocks: int) -> None:
        """Draw until there are `blocks` blocks."""
        while self.drawn < blocks:
            random = np.random.default_rng([self._own_seed, self.drawn])
            for _ in range(self._block):
                self._rows.append(self._draw(random))

    def statistics(self) -> dict[str, float]:
        """Return how many rows were skipped since the last call."""
        skipped, self._skipped = self._skipped, 0
        return {"curriculum/skipped": float(skipped)}

    def _draw(self, random: np.random.Generator) -> int:
        """Return the next row; after a whole pass of skipped rows, return any row."""
        for _ in range(self._n_prompts):
            row = super().row(self._cursor)
            self._cursor += 1
            rate = self._rates.mean(row)
            if rate is None or self._config.low <= rate <= self._config.high or random.random() < self._config.revisit:
                return row
            self._skipped += 1
        row = super().row(self._cursor)
        self._cursor += 1
        return row


def make_stream(job: Job) -> Curriculum | None:
    """Return the stream whose blocks are drawn as soon as one of their groups may start, None without a curriculum."""
    data = job.config.train_dataset
    if (section := with_keys(data, CurriculumKeys).curriculum) is None:
        return None
    return Curriculum(
        job.train_prompts,
        shuffle=data.shuffle,
        seed=job.config.seed,
        config=section,
        keys=prompt_keys(job.train_prompts, section.field),
        block=data.batch_size,
        ahead=job.config.rollout.max_head_offpolicyness + math.ceil(job.config.spare_groups / data.batch_size),
        weights=data.weights,
    )
