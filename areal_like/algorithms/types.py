"""The type of an algorithm: a value that the loop, the batch and the loss follow."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from areal_like.runtime.user_code import user_modules
from areal_like.types import Batch, Floats, Ints, LossSpec, Node, Trajectory

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
    counts once in the statistics of its group; samples of different groups have different ids. `batch` holds their
    tokens, with the fields, all `[tokens]`, `loss_mask` (1 on what was generated), `behaviour_logprobs`, `on_policy` (1
    where the step's own version generated the token), and those of the passes that the algorithm needs. `truncated`
    `[trajectories]` are those whose generation ended at a limit of tokens. `baselines` `[trajectories]` are the
    values of their prompts from earlier steps, if the algorithm needs them. `nodes` `[trajectories]` are their paths in
    the trees of their groups, () if no trajectory has one.
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
    """From scored trajectories to a loss.

    `targets` makes the fields that the loss reads beside those of the experience, such as `advantages`, each
    `[trajectories]` or `[tokens]`; a `loss_mask` among them leaves out what it has as 0. `loss` is the policy's,
    `critic` the critic's, which `values` come from. A group that `keeps` says no to is generated anew from another
    prompt. `weights`, given `loss_mask` `[tokens]` and `lengths` `[sequences]` of a mini-batch, says how much each
    token counts in its mean, `[tokens]`; None: all trained tokens count the same. With `skips_zero_advantages`,
    trajectories whose `advantages` are all 0 are left out of the training pass, and the others count as they would.
    The policy is trained at `temperature`; None: at that of sampling (`gconfig.temperature`).
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
        """Losses that travel to the ranks."""
        return [spec for spec in (self.loss, self.critic) if spec is not None]

    @property
    def user_modules(self) -> list[ModuleType]:
        """Modules that go to the ranks with the losses, by value: they may not be able to import it."""
        parts = [part for spec in self.losses for part in (spec.function, type(spec.parameters))]
        return [module for part in parts for module in user_modules(part)]
