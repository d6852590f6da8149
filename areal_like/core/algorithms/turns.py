"""Credit of turns that are samples of their own, and in trees of groups whose samples share turns or parts of one.

The turns of an episode form one chain, in the order of its trajectories: an agent that rewrites its prompt before each
turn has a trajectory for each, and one whose conversation only grows has one trajectory. Each turn counts once in the
statistics of rewards.

The value of a node of a tree is its own reward plus the mean over its continuations: its children, and the trajectories
that end there. A mean over all trajectories below would give more weight to children that branch more, as long
responses do.

Source: GiGPO (arXiv 2505.10978), eq. 3 to 8, for groups of turns that start in equal states; TreeRL (arXiv 2506.11902),
section 3.2, and Tree-GRPO (arXiv 2509.21240), for values of nodes from their descendants, and for the parent's value as
a baseline.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from areal_like.core.algorithms.normalise import normalise
from areal_like.core.algorithms.settings import Settings
from areal_like.core.algorithms.types import Experience
from areal_like.core.config.schema import NormConfig
from areal_like.core.types import TURN_REWARDS, TURN_STATES, Ints, Node

type Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class TurnRuns:
    """The turns of a step, trajectory by trajectory: runs of generated tokens.

    `ends` and `starts` are places in the batch, of the last token and the first one; `steps` are the places of `ends`
    among the generated tokens; `owner` has the trajectory of each turn. Each is `[turns]`.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    steps: NDArray[np.int64]
    owner: NDArray[np.int64]


def find_turns(experience: Experience) -> TurnRuns:
    """Return the turns of all trajectories."""
    batch = experience.batch
    places = np.flatnonzero(batch.fields["loss_mask"] > 0)
    trajectory = np.repeat(np.arange(len(batch.lengths)), batch.lengths)[places]
    first = (np.diff(places, prepend=-2) != 1) | (np.diff(trajectory, prepend=-1) != 0)
    steps = np.append(np.flatnonzero(first)[1:], len(places)) - 1
    return TurnRuns(places[first], places[steps], steps, trajectory[steps])


def credit_each_turn(experience: Experience, shaped: Doubles, settings: Settings) -> Doubles:
    """Return rewards of the generated tokens whose suffix sums are the normalised values of their turns.

    The reward of an episode (its last trajectory's in `shaped`) is added to its last turn. A turn's return is its
    reward plus the discounted return of the episode's next turn, normalised over turns. With `state_coef`, the
    advantage is instead the episode's, whose rewards are summed without a discount, plus `state_coef` times the
    advantage of the return among the turns of the group that start in the same state.
    """
    turns = find_turns(experience)
    own, groups = _own_rewards(experience, turns, shaped, settings), experience.groups[turns.owner]
    episodes = experience.samples[turns.owner]
    returns = _returns(own, episodes, settings.turn_discount)
    if settings.state_coef is None:
        worth = normalise(returns, groups, settings.reward_norm)
    else:
        totals = np.bincount(episodes, own)[episodes]
        states = (
            np.unique(np.stack([groups, _states(experience, turns)]), axis=1, return_inverse=True)[1]
            .reshape(-1)
            .astype(np.int32)
        )
        in_state = normalise(returns, states, _within_groups(settings.reward_norm))
        worth = normalise(totals, groups, settings.reward_norm) + settings.state_coef * in_state
    following = np.append(np.where(np.diff(turns.owner) == 0, worth[1:], 0), 0)
    result = np.zeros(int(turns.steps[-1]) + 1)
    result[turns.steps] = worth - following
    return result


def _within_groups(norm: NormConfig) -> NormConfig:
    levels = {key: "group" for key in ("mean_level", "std_level") if getattr(norm, key)}
    return norm.model_copy(update=levels)


def _own_rewards(experience: Experience, turns: TurnRuns, shaped: Doubles, settings: Settings) -> Doubles:
    own = np.zeros(len(turns.owner))
    if (given := experience.batch.fields.get(TURN_REWARDS)) is not None:
        own += settings.reward_scaling * given[turns.ends]
    last = _last_of(experience.samples[turns.owner])
    own[last] += shaped[turns.owner[last]]
    return own


def _last_of(episodes: Ints) -> NDArray[np.int64]:
    """Return the place of the last turn of each episode."""
    return len(episodes) - 1 - np.unique(episodes[::-1], return_index=True)[1]


def _returns(own: Doubles, episodes: Ints, discount: float) -> Doubles:
    """Return each turn's reward plus the discounted rewards of later turns of its episode."""
    result, following = own.copy(), dict[int, float]()
    for turn in range(len(own) - 1, -1, -1):
        result[turn] += discount * following.get(int(episodes[turn]), 0.0)
        following[int(episodes[turn])] = float(result[turn])
    return result


def _states(experience: Experience, turns: TurnRuns) -> NDArray[np.int64]:
    """Return a number for the state in which each turn starts: the workflow's, or else the tokens before the turn."""
    batch, numbers = experience.batch, dict[bytes | int, int]()
    named = batch.fields.get(TURN_STATES)
    begin = (np.cumsum(batch.lengths) - batch.lengths)[turns.owner]
    keys: list[bytes | int] = []
    for first, start, end in zip(begin.tolist(), turns.starts.tolist(), turns.ends.tolist(), strict=True):
        state = 0 if named is None else int(named[end])
        keys.append(state or batch.tokens[first:start].tobytes())
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


@dataclass
class Trees:
    """The nodes of all trajectories of a step, parents before children; a root's parent is -1.

    `trained` has (node, trajectory, place) for each trained node, trajectory by trajectory; its last token is at
    `place` in the batch.
    """

    parents: list[int] = field(default_factory=list)
    trained: list[tuple[int, int, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # the last node of each trajectory
    continued: list[bool] = field(default_factory=list)  # whether the sample continues from it in another trajectory

    @property
    def forks(self) -> list[int]:
        """The nearest ancestor of each node with several continuations, -1 if there is none."""
        ways = Counter(self.parents)
        ways.update(end for end, continued in zip(self.ends, self.continued, strict=True) if not continued)
        found: list[int] = []
        for parent in self.parents:
            found.append(parent if parent < 0 or ways[parent] > 1 else found[parent])
        return found


def find_trees(experience: Experience) -> Trees:
    """Return the trees of a step's trajectories; a trajectory without nodes is a chain of its turns."""
    trees, numbers = Trees(), dict[tuple[int, int, int], int]()
    batch = experience.batch
    generated = batch.fields["loss_mask"] > 0
    starts = (np.cumsum(batch.lengths) - batch.lengths).tolist()
    going_on: set[tuple[int, int]] = set()  # node and sample
    for i, (start, length, group, sample) in enumerate(
        zip(starts, batch.lengths.tolist(), experience.groups.tolist(), experience.samples.tolist(), strict=True)
    ):
        nodes = experience.nodes[i] if experience.nodes else ()
        owner = -1 if nodes else i
        for node in nodes or _chain(generated[start : start + length]):
            key = (group, owner, node.number)
            if key not in numbers:
                numbers[key] = len(trees.parents)
                trees.parents.append(numbers.get((group, owner, node.parent if node.parent is not None else -1), -1))
            number, place = numbers[key], start + node.end - 1
            going_on.add((trees.parents[number], sample))
            if generated[place]:
                trees.trained.append((number, i, place))
        trees.ends.append(number)
    samples = experience.samples.tolist()
    trees.continued = [(end, sample) in going_on for end, sample in zip(trees.ends, samples, strict=True)]
    return trees


def _chain(generated: NDArray[np.bool]) -> Sequence[Node]:
    """Return the turns of a trajectory, which are runs of generated tokens."""
    edges = np.flatnonzero(np.diff(generated, prepend=False, append=False)).reshape(-1, 2).tolist()
    return [Node(i, i - 1 if i else None, end, end - first) for i, (first, end) in enumerate(edges)]


def values_of(trees: Trees, of_trajectories: Doubles, own: Doubles, discount: float) -> Doubles:
    """Return the value of each node: its `own` reward plus the mean over its continuations.

    The continuations are its children's values, discounted, and the values `of_trajectories` that end there.
    """
    total, count = np.zeros(len(own)), np.zeros(len(own))
    for end, continued, value in zip(trees.ends, trees.continued, of_trajectories.tolist(), strict=True):
        if not continued:
            total[end] += value
            count[end] += 1
    values = own.copy()
    for node in range(len(own) - 1, -1, -1):  # children before parents
        values[node] += total[node] / max(count[node], 1)
        if (parent := trees.parents[node]) >= 0:
            total[parent] += discount * values[node]
            count[parent] += 1
    return values


def spread(trees: Trees, worth: Doubles, places: NDArray[np.int64]) -> Doubles:
    """Return rewards of the generated tokens, at `places`, whose suffix sums are the `worth` of their nodes."""
    result = np.zeros(len(places))
    following = [
        worth[after[0]] if after[1] == trajectory else 0.0
        for (_, trajectory, _), after in zip(trees.trained, [*trees.trained[1:], (0, -1, 0)], strict=True)
    ]
    nodes, _, ends = np.array(trees.trained, np.int64).T
    result[np.searchsorted(places, ends)] = worth[nodes] - np.array(following)
    return result


def share_costs(trees: Trees, costs: Doubles, places: NDArray[np.int64]) -> Doubles:
    """Return costs of the generated tokens, at `places`, with the suffix sums of the trees.

    The suffix sum of a token has the `costs` of its node from this token on, and the mean over the node's
    continuations: the sums of its children, and 0 for a trajectory that ends there.
    """
    nodes, owners, ends = np.array(trees.trained, np.int64).T
    last = np.searchsorted(places, ends)
    own = np.zeros(len(trees.parents))
    own[nodes] = np.diff(np.cumsum(costs)[last], prepend=0)
    sums = values_of(trees, np.zeros(len(trees.ends)), own, 1.0)
    following = np.append(np.where(np.diff(owners) == 0, sums[nodes[1:]], 0), 0)
    result = costs.copy()
    result[last] += (sums - own)[nodes] - following
    return result
