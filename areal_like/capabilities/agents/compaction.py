"""Conversations that an agent continues from a summary instead of the messages themselves."""

from collections.abc import Sequence

from areal_like.capabilities.agents.conversation import Message
from areal_like.capabilities.agents.turn import Turn

LEAST_LETTERS = 16  # minimum length of a summary; shorter answers occur in other texts by chance


def find_summary(turns: Sequence[Turn], messages: Sequence[Message]) -> Turn | None:
    """Return the latest turn without a continuation whose answer is in the messages of a new conversation."""
    parents = {turn.parent for turn in turns}
    texts = [message["content"] for message in messages if isinstance(message.get("content"), str)]
    for turn in reversed(turns):
        if turn not in parents and any(_contains(text, turn) for text in texts):
            return turn
    return None


def _contains(text: str, turn: Turn) -> bool:
    """Return whether a text contains the answer of a turn, with or without its thinking."""
    answer = turn.messages[-1].get("content") or ""
    summaries = {part.strip() for part in (answer, answer.rpartition("</think>")[2])}
    return any(len(summary) >= LEAST_LETTERS and summary in text for summary in summaries)
