"""The type of an algorithm, which configures the loop, the batch and the loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from areal_like.core.types import Batch, Floats, Ints, LossSpec, Node, Trajectory
from areal_like.core.user_code import user_modules

Need = Literal["reference", "values", "policy", "proximal", "teacher", "baselines"]
"""A forward pass whose result is a field of the batch.

Before `targets`, over the whole batch: `reference` gives `reference_logprobs`, the reference policy's; `values` the
critic's; `policy` gives `proximal_logprobs`, of the weights that the step starts from. `proximal` gives these to the
loss alone, and only where a step has several mini-batches: in the first one they are the current ones. `teacher` needs
no pass: trajectories come with `teacher_logprobs`; `baselines` gives those of the experience.
Log-probs are 0 where `loss_mask` is.
"""


@dataclass(frozen=True)
class Experience:
    """The scored trajectories of a step, joined.

    `rewards`, `groups` and `samples` (ids) are `[trajectories]`. The conversations of one episode are one sample, which
    counts once in the statistics of its group; samples of different groups have different ids. `batch` has their tokens
    and fields, all `[tokens]`: `loss_mask` (1 for generated tokens), `behaviour_logprobs`, `on_policy` (1 if the step's
    own version generated the token), and the results of the passes that the algorithm needs. `truncated`
    `[trajectories]` marks trajectories that ended at a token limit. `baselines` `[trajectories]` has the values of
    their prompts from earlier steps, if the algorithm needs them. `nodes` `[trajectories]` has their paths in the trees
    of their groups, () if no trajectory has one.
    """

    rewards: Floats
    groups: Ints
    samples: Ints
    batch: Batch
    truncated: NDArray[np.bool]
    baselines: Floats | None = None
    nodes: Sequence[Sequence[Node]] = ()


@dataclass(frozen=True)
class Algorithm:
    """The path from scored trajectories to a loss.

    `targets` computes the loss's fields that the experience lacks, such as `advantages`, each `[trajectories]` or
    `[tokens]`; a `loss_mask` among them excludes tokens or trajectories with 0. `loss` is the policy's loss, `critic`
    is the loss of the critic that computes `values`. A group that `keeps` rejects is replaced by a group of another
    prompt. `weights` maps `loss_mask` `[tokens]` and `lengths` `[sequences]` of a mini-batch to each token's weight in
    the mean, `[tokens]`; with None all trained tokens have the same weight. With `skips_zero_advantages`, trajectories
    whose `advantages` are all 0 are left out of the training pass, without changing the weight of the others. The
    policy is trained at `temperature`; None means the temperature of sampling (`gconfig.temperature`).
    """

    targets: Callable[[Experience], Mapping[str, Floats]]
    loss: LossSpec
    needs: frozenset[Need] = frozenset()
    critic: LossSpec | None = None
    keeps: Callable[[Sequence[Trajectory]], bool] | None = None
    weights: Callable[[Floats, Ints], Floats] | None = None
    skips_zero_advantages: bool = False
    temperature: float | None = None

    @property
    def losses(self) -> list[LossSpec]:
        """Losses that are sent to the ranks."""
        return [spec for spec in (self.loss, self.critic) if spec is not None]

    @property
    def user_modules(self) -> list[ModuleType]:
        """Modules sent to the ranks with the losses, by value, because the ranks may be unable to import them."""
        parts = [part for spec in self.losses for part in (spec.function, type(spec.parameters))]
        return [module for part in parts for module in user_modules(part)]
