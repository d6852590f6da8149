"""Requests whose last message is the assistant's: the start of the answer, which Anthropic's Messages define."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_like.data.prefill import WHY_NOT, split_prefill


def find_problem(messages: Sequence[Mapping[str, Any]], continues: bool) -> str | None:
    """Return why a request cannot be answered if its last message is the assistant's; None if it can be."""
    _, start = split_prefill(messages)
    if start is None:
        return f"the last message is the assistant's, {WHY_NOT}. Leave it out"
    if messages[-1].get("role") != "assistant" or continues:
        return None
    return (
        "the last message is the assistant's, and an answer is the assistant's next message. Leave it out, or set "
        "continue_final_message=true to continue it"
    )


def start_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that the answer to a request continues; "" without one."""
    return split_prefill(messages)[1] or ""


def with_answer(messages: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the conversation with an answer, which is one message with the text that it continues."""
    if not messages or messages[-1].get("role") != "assistant":
        return [*messages, answer]
    return [*messages[:-1], {**answer, "content": start_of(messages) + answer["content"]}]


def merge_answers(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with successive texts of the assistant as one, as Anthropic combines them."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        last = merged[-1] if merged else {}
        is_text = all(isinstance(each.get("content"), str) for each in (last, message))
        if is_text and last.get("role") == message["role"] == "assistant" and not last.get("tool_calls"):
            merged[-1] = {**message, "content": last["content"] + message["content"]}
        else:
            merged.append(message)
    return merged
