"""One turn of an episode, and the trajectories of its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from areal_like.images import Images
from areal_like.rollout.response import Response
from areal_like.types import Floats, Ints, Node, Prompt, Reward, Trajectory
from areal_like.workflows.conversation import Context, Continuity, Message
from areal_like.workflows.joining import Part, join_parts, not_trained


@dataclass(eq=False)
class Turn:
    """A request and what was generated for it. `new` is what its prompt has beyond the parent's tokens, `images` the
    images of those.

    `messages` is the conversation with the answer; `why` explains `continuity`. `follows` is the turn that a
    conversation with other tokens continues, such as that of the summary it begins with. `delivered` is False where
    the connection closed before the answer was sent, True where it was sent or the conversation continues it.
    """

    parent: Turn | None
    new: Ints
    response: Response
    messages: Sequence[Message]
    context: Context
    continuity: Continuity
    why: str = ""
    follows: Turn | None = None
    delivered: bool | None = None
    images: Images = ()

    @property
    def all_images(self) -> Images:
        """The images of `tokens`."""
        return tuple(image for turn in self.path for image in turn.images)

    @property
    def is_orphan(self) -> bool:
        """Whether no client has read the answer; such a turn is not trained on."""
        return self.delivered is False

    @property
    def path(self) -> list[Turn]:
        """The turns that lead here, the first one first."""
        turns = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    @property
    def tokens(self) -> Ints:
        """The prompt of this turn and its response."""
        parts = [part for turn in self.path for part in (turn.new, turn.response.tokens)]
        return np.concatenate(parts).astype(np.int32)

    @property
    def tokens_routed(self) -> int:
        """How many of `tokens`, from the first one on, have routes in this turn or one before."""
        return len(self.tokens) - 1 if self.response.routes is not None and len(self.response.tokens) else 0


def join_turns(
    turns: Sequence[Turn], prompt: Prompt, group_id: int, reward: Reward, numbers: dict[Turn, int] | None = None
) -> list[Trajectory]:
    """Return a trajectory for each turn that no other turn continues, all with the same reward.

    Every generated token is trained on once: where several continue the same turn, it counts as generated in the
    first, and is part of the prompt of the others. Rewards of turns are in the order of `turns`. `numbers` has the
    turns that other episodes of the group are trained on, and gets these; a trajectory with nothing of its own is left
    out.
    """
    parents = {turn.parent for turn in turns}
    worth = dict(zip(turns, reward.turns, strict=False))
    has_nodes = numbers is not None or any(turn.follows for turn in turns)
    known: dict[Turn, int] = {} if numbers is None else numbers
    result = []
    for leaf in (turn for turn in turns if turn not in parents):
        path = leaf.path
        if all(turn in known for turn in path):
            continue
        parts: list[Part] = []
        for turn in path:
            parts += [turn.new, not_trained(turn.response) if turn in known else turn.response]
        for turn in path:
            known.setdefault(turn, len(known))
        item = join_parts(replace(prompt, images=leaf.all_images), group_id, parts, reward)
        if worth:
            item = replace(item, turn_rewards=_turn_rewards(path, worth))
        result.append(replace(item, nodes=_nodes(path, known)) if has_nodes else item)
    return result


def _nodes(path: Sequence[Turn], numbers: Mapping[Turn, int]) -> tuple[Node, ...]:
    """Return the nodes of a trajectory; the first one's parent is the turn that the conversation follows."""
    nodes: list[Node] = []
    parent, end = _number_of(path[0].follows, numbers), 0
    for turn in path:
        size = len(turn.response.tokens)
        end += len(turn.new) + size
        if size:
            nodes.append(Node(numbers[turn], parent, end, size))
            parent = nodes[-1].number
    return tuple(nodes)


def _number_of(turn: Turn | None, numbers: Mapping[Turn, int]) -> int | None:
    while turn is not None and not len(turn.response.tokens):
        turn = turn.parent
    return None if turn is None else numbers.get(turn)


def _turn_rewards(path: Sequence[Turn], worth: Mapping[Turn, float]) -> Floats:
    """Return the reward of each turn at its last token, `[tokens]` of the trajectory."""
    result = np.zeros(len(path[-1].tokens), np.float32)
    ends = np.cumsum([len(turn.new) + len(turn.response.tokens) for turn in path])
    for turn, end in zip(path, ends, strict=True):
        result[end - 1] += worth.get(turn, 0.0) if len(turn.response.tokens) else 0.0
    return result
