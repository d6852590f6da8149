"""One turn of an episode, and the trajectories of its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from areal_like.capabilities.agents.conversation import Continuity, Message, TemplateContext
from areal_like.core.columns import all_columns
from areal_like.core.rollout.joining import Part, join_parts, not_trained
from areal_like.core.rollout.sample import Response
from areal_like.core.types import TURN_REWARDS, TURN_STATES, Images, Ints, Node, Prompt, Reward, Trajectory


@dataclass(eq=False)
class Turn:
    """A request and its response.

    `new` has the prompt's tokens after the parent's, `images` has the images in `new`.

    `messages` is the conversation with the answer; `why` explains `continuity`. `follows` is the turn that a
    conversation with other tokens continues, for example the turn that wrote its summary. `delivered` is False if the
    connection closed before the answer was sent, True if the answer was sent or the conversation continues it. `start`
    is the part of the answer's message that the request had. `stopped_by` is the stop text that ended the response.
    """

    parent: Turn | None
    new: Ints
    response: Response
    messages: Sequence[Message]
    context: TemplateContext
    continuity: Continuity
    why: str = ""
    follows: Turn | None = None
    delivered: bool | None = None
    images: Images = ()
    start: str = ""
    stopped_by: str | None = None

    @property
    def text(self) -> str:
        """The text of the answer, without the text that it continues."""
        return str(self.messages[-1]["content"]).removeprefix(self.start)

    @property
    def all_images(self) -> Images:
        """The images of `tokens`."""
        return tuple(image for turn in self.path for image in turn.images)

    def note_delivery(self, is_sent: bool) -> None:
        """Record whether a client received the answer; one of several waiting clients is enough."""
        self.delivered = is_sent or bool(self.delivered)

    @property
    def is_orphan(self) -> bool:
        """Whether no client has read the answer; such a turn is not trained on."""
        return self.delivered is False

    @property
    def path(self) -> list[Turn]:
        """The turns from the first one to this one."""
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
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.tokens) - len(self.response.tokens)

    @property
    def known_inputs(self) -> int:
        """The number of leading `tokens` whose columns of inputs are in this turn or an earlier one."""
        return len(self.tokens) - 1 if self.response.inputs and len(self.response.tokens) else 0


def join_turns(
    turns: Sequence[Turn], prompt: Prompt, group_id: int, reward: Reward, numbers: dict[Turn, int] | None = None
) -> list[Trajectory]:
    """Return a trajectory for each turn that no other turn continues, all with the same reward.

    Every generated token is trained on once: if several trajectories continue the same turn, its tokens count as
    generated in the first and as prompt in the others. Rewards and states of turns are in the order of `turns`.
    `numbers` has the turns trained in other episodes of the group, and these turns are added; a trajectory without
    turns of its own is left out.
    """
    parents = {turn.parent for turn in turns}
    given = {TURN_REWARDS: reward.turns, TURN_STATES: reward.states}
    of_turns = {name: dict(zip(turns, values, strict=False)) for name, values in given.items() if values}
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
        at_ends = {name: _at_ends(path, values).astype(all_columns()[name].dtype) for name, values in of_turns.items()}
        item = replace(item, columns={**item.columns, **at_ends})
        result.append(replace(item, nodes=_nodes(path, known)) if has_nodes else item)
    return result


def _nodes(path: Sequence[Turn], numbers: Mapping[Turn, int]) -> tuple[Node, ...]:
    """Return the nodes of a trajectory; the first node's parent is the turn that the conversation follows."""
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


def _at_ends(path: Sequence[Turn], values: Mapping[Turn, float]) -> NDArray[np.float64]:
    """Return the value of each turn at its last token, `[tokens]` of the trajectory."""
    result = np.zeros(len(path[-1].tokens))
    ends = np.cumsum([len(turn.new) + len(turn.response.tokens) for turn in path])
    for turn, end in zip(path, ends, strict=True):
        result[end - 1] += values.get(turn, 0.0) if len(turn.response.tokens) else 0.0
    return result
