"""Single-turn groups whose samples share the first parts of their responses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_like.capabilities.agents.prefills import Prefills
from areal_like.capabilities.agents.schema import BranchConfig
from areal_like.core.rollout.joining import as_response, join_parts, not_trained
from areal_like.core.rollout.pool import Response, Sampling, ServerPool
from areal_like.core.rollout.single_turn import TRAJECTORIES, SingleTurn
from areal_like.core.rollout.turns import Turns
from areal_like.core.types import FinishReason, Node, Prompt, Reward, Score, Trajectory, Workflow


@dataclass(eq=False)
class Part:
    """A part of a response, shared by samples or the last part of one sample."""

    parent: Part | None
    response: Response

    @property
    def path(self) -> list[Part]:
        """The parts from the first one to this one."""
        return [*(self.parent.path if self.parent else ()), self]


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
            responses = [np.concatenate([part.response.tokens for part in leaf.path]) for leaf in leaves]
            rewards = await self.score(prompt, responses)
            trajectories, numbers = list[Trajectory](), dict[Part, int]()
            for sample in sorted(range(len(leaves)), key=lambda sample: rewards[sample].value is None):
                await self.turn()
                trajectories.append(_join(prompt, group_id, sample, leaves[sample], rewards[sample], numbers))
            return trajectories
        except asyncio.CancelledError:
            self.pool.cancel(group.made)
            raise
        finally:
            self.pool.end_session(group_id)


class _BranchingGroup:
    """A group during generation; `made` has its responses so far."""

    def __init__(self, workflow: Branching, prompt: Prompt, group_id: int) -> None:
        self._workflow, self._prompt, self._id = workflow, np.array(prompt.tokens, np.int32), group_id
        self._images = prompt.images
        self.made: list[Response] = []

    async def generate(self) -> list[Part]:
        """Return the last part of each sample."""
        workflow = self._workflow
        roots = workflow.n_samples // workflow.branch.per_root
        if workflow.prefill_once and workflow.seed is None and roots > 1:
            await Prefills(workflow.pool, self._id).cache(self._prompt.tolist(), workflow.sampling, self._images)
        return await self._generate_all(None, (), roots)

    async def _generate_all(self, parent: Part | None, place: tuple[int, ...], n: int) -> list[Part]:
        leaves = await _all([self._generate(parent, (*place, i)) for i in range(n)])
        return [leaf for part in leaves for leaf in part]

    async def _generate(self, parent: Part | None, place: tuple[int, ...]) -> list[Part]:
        """Generate the part of a response at a `place` in the tree, and its continuations."""
        workflow, level = self._workflow, len(place) - 1
        points = [0, *workflow.branch.after, workflow.sampling.max_new_tokens]
        most = points[level + 1] - points[level]
        tokens = np.concatenate([self._prompt, *(part.response.tokens for part in (parent.path if parent else ()))])
        response = await workflow.pool.sample(
            tokens.tolist(),
            replace(workflow.sampling, max_new_tokens=most),
            seed=self._seed(place),
            priority=self._id,
            session=self._id,
            inputs_from=len(tokens) - 1 if parent and parent.response.inputs else 0,
            images=self._images,
        )
        self.made.append(response)
        part = Part(parent, response)
        goes_on = response.finish_reason is FinishReason.LENGTH and len(response.tokens) == most
        if not goes_on or level == len(workflow.branch.after):
            return [part]
        return await self._generate_all(part, place, workflow.branch.width)

    def _seed(self, place: tuple[int, ...]) -> int | None:
        if self._workflow.seed is None:
            return None
        key = [self._workflow.seed, self._id, len(place), *place]  # the length distinguishes trailing zeros
        return int(np.random.SeedSequence(key).generate_state(1)[0])


def built_in(
    pool: ServerPool,
    score: Score,
    sampling: Sampling,
    n_samples: int,
    seed: int | None,
    branch: BranchConfig | None,
    *,
    prefill_once: bool,
) -> Workflow:
    """Return the built-in workflow, whose samples share only their prompt or branch later."""
    if branch is None:
        return SingleTurn(pool, score, sampling, n_samples, seed)
    return Branching(pool, score, sampling, n_samples, branch, seed, prefill_once=prefill_once)


async def _all[T](coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all coroutines; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _join(
    prompt: Prompt, group_id: int, sample: int, leaf: Part, reward: Reward, numbers: dict[Part, int]
) -> Trajectory:
    """Return the trajectory of a sample, which trains the parts of its path without a number yet."""
    parts, nodes, end = [as_response(prompt.tokens)], list[Node](), len(prompt.tokens)
    for part in leaf.path:
        parts.append(not_trained(part.response) if part in numbers else part.response)
        number, size = numbers.setdefault(part, len(numbers)), len(part.response.tokens)
        end += size
        nodes.append(Node(number, nodes[-1].number if nodes else None, end, size))
    return replace(join_parts(prompt, group_id, parts, reward, sample), nodes=tuple(nodes))
