"""The nouns of a run. Arrays are numpy, never padded; torch appears only inside the trainer.

A value per token always describes the token at its own position: `logprobs[i]` is
log p(tokens[i] | tokens[:i]), so it is meaningless (0) for a sequence's first token.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_like.core.columns import Column, Columns, Use, Values, column_of, declare

type Images = tuple[bytes, ...]
"""The images of a sequence, encoded as PNG or JPEG, in the order of their tokens."""

type Device = Literal["cpu", "cuda"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

LEAST_LOGPROB = -103.28  # of float32's least positive number, for which a teacher's probability of 0 is taken

LOSS_MASK = declare(Column("loss_mask", use="host"))  # 1 where a token is trained on
TEMPERATURES = declare(Column("temperatures", use="sampling"))  # that tokens were sampled at, 0 for the run's
TEACHER_LOGPROBS = declare(Column("teacher_logprobs"))  # of the sampled tokens
TEACHER_IDS = declare(Column("teacher_ids", np.int32, None, use="label"))  # the likeliest ids, `[tokens, k]`
TEACHER_TOP = declare(Column("teacher_top_logprobs", width=None))  # and the teacher's log-probs of them
TURN_REWARDS = declare(Column("turn_rewards"))  # each at the last token of its turn
TURN_STATES = declare(Column("turn_states", np.int64, use="host"))  # in the same places, the number of the first state


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"  # the model emitted an end token
    LENGTH = "length"  # max_new_tokens or the context was reached


@dataclass(frozen=True)
class Prompt:
    """One dataset row, ready to be generated from.

    `sample_id` is the row's number in the dataset, `row` the row with all of its columns, `answer` its reference answer
    ("" where it has none). `tokens` are the prompt as it is generated from. `dataset` names the set of a mixture that
    it is from, "" for the one at `path`. `messages()` is the
    conversation that the tokens are of. `images` belong to the tokens, which have one image token for each part of each
    image.
    """

    sample_id: int
    tokens: Sequence[int]
    answer: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""
    messages: Callable[[], Sequence[Mapping[str, Any]]] = field(default=tuple, compare=False)
    images: Images = ()


type AnswerCheck = Callable[[str], tuple[str, str] | None]
"""What a reference answer lacks, so that no response can equal it, and what would do; None where nothing is wrong."""


class Piece(NamedTuple):
    """Part of a response that a server generated since the previous one.

    `columns` are `[3, tokens]`: tokens, their log-probs as the bits of float32, and versions, which never go down.
    `info` has the fields of the columns that servers return (`columns.Column.sent`).
    """

    columns: Ints
    finish_reason: FinishReason | None
    info: Any = None


@dataclass(frozen=True)
class Reward:
    """Reward of a response: `value`, None where it is missing, and named parts, which are recorded beside it.

    `turns` are rewards of an episode's turns beside its own, in the order of the answers; `states` has the number of
    the state in which each turn starts.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[float, ...] = ()
    states: tuple[int, ...] = ()


@dataclass(frozen=True)
class Node:
    """A node in the tree of a group: a turn's answer, or a part of a response between two branching points.

    `number` names it in its group and is larger than its `parent`'s, the node that it continues, None for a root. Its
    `tokens` are the last ones before `end` in the trajectory.
    """

    number: int
    parent: int | None
    end: int
    tokens: int


@dataclass(frozen=True)
class Trajectory:
    """A prompt and one response to it.

    Shapes: `tokens`, `logprobs`, `versions` are `[tokens]`. `versions` is the weight version that generated each token,
    and -1 where no model did, as in the prompt; each generated token is trained, and there is at least one. `logprobs`
    are the behaviour policy's (temperature applied), 0 where nothing was generated. `reward` is None when it is missing
    (a timed-out or crashed verifier); `reward_parts` are recorded beside it. `sample` numbers the episodes of a group;
    one with several conversations gives several trajectories. `columns` are further values of each token
    (`columns.py`): those that servers returned, the teacher's, rewards and states of turns, as far as there are any.
    `images` are those of the whole sequence, in the order of their tokens; image tokens are never trained. `nodes` are
    the path through the tree of the group, from the root on, where samples share generated tokens or a conversation
    continues another one; what samples share is generated in one trajectory of theirs, and has version -1 in the
    others.
    """

    sample_id: int
    group_id: int
    tokens: Ints
    logprobs: Floats
    versions: Ints
    finish_reason: FinishReason
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    sample: int = 0
    columns: Columns = field(default_factory=dict)
    images: Images = ()
    nodes: tuple[Node, ...] = ()

    @property
    def generated(self) -> NDArray[np.bool]:
        """Where a model generated the token, `[tokens]`."""
        return self.versions >= 0

    @property
    def response_length(self) -> int:
        """Tokens that models have generated for this trajectory, also where another one is trained on them."""
        return sum(node.tokens for node in self.nodes) or int(self.generated.sum())

    @property
    def oldest_version(self) -> int:
        """Version of the oldest generated token; staleness is counted from it."""
        return int(self.versions[self.generated].min())


type Workflow = Callable[[Prompt, int], Coroutine[Any, Any, list[Trajectory]]]
"""From a prompt and its group's id to the group's trajectories. A smaller id is an older group, to be served first."""

type Score = Callable[[Prompt, Sequence[Ints]], Coroutine[Any, Any, Sequence[Reward]]]
"""One reward for each response to a prompt, all of one group."""


def generated_in(trajectories: Sequence[Trajectory]) -> int:
    """Return how many tokens of trajectories the servers generated: tokens of data have no log-prob (Rollout.given)."""
    return sum(int(np.count_nonzero(item.generated & ~np.isnan(item.logprobs))) for item in trajectories)


def mean_reward(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the mean reward of a group, in which each sample counts once; None if all rewards are missing."""
    by_sample: dict[int, list[float]] = {}
    for item in trajectories:
        if item.reward is not None:
            by_sample.setdefault(item.sample, []).append(item.reward)
    return float(np.mean([np.mean(own) for own in by_sample.values()])) if by_sample else None


@dataclass(frozen=True)
class Batch:
    """Sequences back to back, as the trainer takes them.

    `lengths` is `[sequences]`; `tokens` and each column of `fields` are `[tokens, …]`, tokens = sum(lengths).
    `fields["loss_mask"]` is 1 where a token is trained on. `fields["loss_weights"]` says how much each one's
    loss counts in the mean over these tokens; without it all count the same. Other fields are the trajectories' columns
    and the inputs of the loss. `images` has the images of each sequence, None where no sequence has any.
    """

    lengths: Ints
    tokens: Ints
    fields: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Images, ...] | None = None

    def with_field(self, name: str, values: Values | None) -> "Batch":
        """Return the batch with one more field, or another one of this name; without it if `values` is None."""
        others = {other: given for other, given in self.fields.items() if other != name}
        return replace(self, fields=others if values is None else {**others, name: values})

    def of_use(self, *uses: Use) -> dict[str, Any]:
        """Return the fields that the trainer uses in these ways."""
        return {name: given for name, given in self.fields.items() if column_of(name, given).use in uses}

    def drop(self, use: Use) -> "Batch":
        """Return the batch without the fields of a use, for example `input` for other models than the policy."""
        return replace(
            self, fields={name: given for name, given in self.fields.items() if name not in self.of_use(use)}
        )


@dataclass(frozen=True)
class LossSpec:
    """A loss as it travels to the ranks: `function(inputs, parameters)`, with `algorithms.losses.LossInputs`.

    The function is a module's own, so that a rank imports it.
    """

    function: Callable[..., Any]
    parameters: Any = None


def value_at(row: Mapping[str, Any], field: str) -> Any:
    """Return the value of a column or a field nested in it, such as `reward_model.ground_truth`; None without one."""
    if field in row:
        return row[field]
    value: Any = row
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
