"""A last message of the assistant: the start of the next response, which continues its text."""

from collections.abc import Mapping, Sequence
from typing import Any

WHY_NOT = "that cannot be continued: only text can, without tool calls, thinking and images"
_OTHERS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


def split_prefill(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], str | None]:
    """Return the messages before a last one of the assistant, and its text; None if it cannot be continued.

    Without such a message these are all messages, and "".
    """
    if not messages or messages[-1].get("role") != "assistant":
        return messages, ""
    last = messages[-1]
    content = last.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    if any(last.get(name) for name in _OTHERS) or any(part.get("type") != "text" for part in parts):
        return messages[:-1], None
    return messages[:-1], "".join(part["text"] for part in parts)
