"""Single-turn groups whose samples share the first parts of their responses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_like.capabilities.agents.conversation import Continuity, TemplateContext
from areal_like.capabilities.agents.prefills import Prefills
from areal_like.capabilities.agents.schema import BranchConfig
from areal_like.capabilities.agents.turn import Turn, join_turns
from areal_like.core.rollout.pool import Response, Sampling, ServerPool
from areal_like.core.rollout.single_turn import TRAJECTORIES
from areal_like.core.rollout.turns import Turns
from areal_like.core.types import FinishReason, Prompt, Score, Trajectory


@dataclass(frozen=True)
class Branching:
    """The workflow of a group whose responses branch after fixed numbers of tokens, each into `branch.width` parts.

    A response that ends before a branching point is one sample, so that a group may have fewer than `n_samples`. All
    requests of a group go to one server, whose cache has the shared tokens. Shared tokens are trained on once, in the
    first of their samples with a reward. With a `seed`, samples depend on it, on the group's id and on their path.
    """

    pool: ServerPool
    score: Score
    sampling: Sampling
    n_samples: int
    branch: BranchConfig
    seed: int | None = None
    prefill_once: bool = True
    turn: Turns = field(default_factory=lambda: Turns(TRAJECTORIES))

    async def __call__(self, prompt: Prompt, group_id: int) -> list[Trajectory]:
        group = _BranchingGroup(self, prompt, group_id)
        try:
            leaves = await group.generate()
            responses = [np.concatenate([turn.response.tokens for turn in leaf.path]) for leaf in leaves]
            rewards = await self.score(prompt, responses)
            trajectories, numbers = list[Trajectory](), dict[Turn, int]()
            for sample in sorted(range(len(leaves)), key=lambda sample: rewards[sample].value is None):
                await self.turn()
                (whole,) = join_turns(leaves[sample].path, prompt, group_id, rewards[sample], numbers)
                trajectories.append(replace(whole, sample=sample))
            return trajectories
        except asyncio.CancelledError:
            self.pool.cancel(group.made)
            raise
        finally:
            self.pool.end_session(group_id)


class _BranchingGroup:
    """A group during generation; `made` has its responses so far. Each part of a response is a turn."""

    def __init__(self, workflow: Branching, prompt: Prompt, group_id: int) -> None:
        self._workflow, self._prompt, self._id = workflow, np.array(prompt.tokens, np.int32), group_id
        self._images = prompt.images
        self.made: list[Response] = []

    async def generate(self) -> list[Turn]:
        """Return the last part of each sample."""
        workflow = self._workflow
        roots = workflow.n_samples // workflow.branch.per_root
        if workflow.prefill_once and workflow.seed is None and roots > 1:
            await Prefills(workflow.pool, self._id).cache(self._prompt.tolist(), workflow.sampling, self._images)
        return await self._generate_all(None, (), roots)

    async def _generate_all(self, parent: Turn | None, place: tuple[int, ...], n: int) -> list[Turn]:
        leaves = await _all([self._generate(parent, (*place, i)) for i in range(n)])
        return [leaf for turn in leaves for leaf in turn]

    async def _generate(self, parent: Turn | None, place: tuple[int, ...]) -> list[Turn]:
        """Generate the part of a response at a `place` in the tree, and its continuations."""
        workflow, level = self._workflow, len(place) - 1
        points = [0, *workflow.branch.after, workflow.sampling.max_new_tokens]
        most = points[level + 1] - points[level]
        tokens = parent.tokens if parent else self._prompt
        response = await workflow.pool.sample(
            tokens.tolist(),
            replace(workflow.sampling, max_new_tokens=most),
            seed=self._seed(place),
            priority=self._id,
            session=self._id,
            inputs_from=parent.known_inputs if parent else 0,
            images=self._images,
        )
        self.made.append(response)
        new, images = (tokens[:0], ()) if parent else (tokens, self._images)
        turn = Turn(parent, new, response, (), TemplateContext(), Continuity.FIRST, images=images)
        goes_on = response.finish_reason is FinishReason.LENGTH and len(response.tokens) == most
        if not goes_on or level == len(workflow.branch.after):
            return [turn]
        return await self._generate_all(turn, place, workflow.branch.width)

    def _seed(self, place: tuple[int, ...]) -> int | None:
        if self._workflow.seed is None:
            return None
        key = [self._workflow.seed, self._id, len(place), *place]  # the length distinguishes trailing zeros
        return int(np.random.SeedSequence(key).generate_state(1)[0])


async def _all[T](coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all coroutines; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
