"""The conversation of a row: messages and tools in the form that chat templates take, and the problems of other rows.

Keys of messages, parts, calls and tools that are null are left out: in OpenAI's format null means that a key is
missing. The arguments of calls and the schemas of tools are the author's, and keep their nulls.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_like.data.prefill import WHY_NOT, split_prefill

# Text with a list of messages, as JSON or as Python prints it
_STARTS = re.compile(r"[\s\"]*[\[{]")
_ROLE = re.compile(r"""["']role\\*["']\s*:\s*\\*["'](system|developer|user|assistant|tool|function)\\*["']""")
_MEANT = ("default", "const", "example")  # keys of a JSON schema whose value may be null


def read_prompt(value: Any) -> Any:
    """Return a prompt; messages for JSON text of a list of messages."""
    if isinstance(value, str) and _is_like_messages(value):
        found = _parse(value)
        if isinstance(found, list) and found and all(isinstance(each, dict) and "role" in each for each in found):
            return found
    return value


def find_problem(prompt: Any, sees: bool) -> str | None:
    """Return why a prompt is neither text nor a conversation that can be trained on; `sees` allows images."""
    if isinstance(prompt, str):
        if not prompt.strip():
            return "nothing"
        if _is_like_messages(prompt) and not isinstance(_parse(prompt), _Trailing):
            return f"text that looks like messages and is not a JSON list of them ({prompt.strip()[:60]})"
        return None
    if isinstance(prompt, bytes | bytearray):
        return "bytes (a binary column), and a prompt is text"
    if isinstance(prompt, Mapping) or not hasattr(prompt, "__iter__"):
        return "neither a text nor a list of messages"
    messages = list(prompt)
    if not messages:
        return "no message"
    return next(filter(None, (_message_problem(message, sees) for message in messages)), None)


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null keys, with content, and with the arguments of its calls as objects.

    Missing content is empty text, as servers have it; some templates would write None.
    """
    kept = _without_nulls(message)
    content = kept.setdefault("content", "")
    if not isinstance(content, str):
        kept["content"] = [_without_nulls(part) for part in content]
    if "tool_calls" in kept:
        kept["tool_calls"] = [_plain_call(call) for call in kept["tool_calls"]]
    return kept


def plain_tools(tools: Any) -> list[dict[str, Any]]:
    """Return tools from a list of JSON schemas or of their JSON text, or one schema; raises ValueError, TypeError."""
    every = [tools] if isinstance(tools, Mapping) else list(tools)
    every = [json.loads(tool) if isinstance(tool, str) else tool for tool in every]
    if wrong := [tool for tool in every if not isinstance(tool, Mapping)]:
        raise ValueError(f"a tool is {type(wrong[0]).__name__}, not an object")
    return [_plain_call(tool) for tool in every]


def ending_problem(messages: Sequence[Mapping[str, Any]], how: str) -> tuple[str, str] | None:
    """Return problem and fix of a last assistant message under `last_assistant`; None if there is none."""
    if messages[-1].get("role") != "assistant":
        return None
    if how == "continue":
        why = split_prefill(messages)[1]
        return (f"a last message of the assistant {WHY_NOT}", "set last_assistant=drop") if why is None else None
    return (
        "a last message of the assistant, and a response is the assistant's next message",
        "set last_assistant=drop if it is the solution, or last_assistant=continue if responses start with it",
    )


def without_ending(messages: Sequence[Any]) -> list[Any]:
    """Return messages without the last ones of the assistant."""
    kept = list(messages)
    while kept and kept[-1].get("role") == "assistant":
        kept.pop()
    return kept


def find_null(messages: Any, tools: Any) -> str | None:
    """Return the first key of calls' arguments or tools' schemas that is null, which the prompt shows."""
    calls = (message.get("tool_calls") or () for message in messages if isinstance(message, Mapping))
    own = [part for call in calls for part in _arguments(call)]
    schemas = [tool for tool in tools or () if isinstance(tool, Mapping)] if isinstance(tools, list) else []
    return next((key for value in [*own, *map(_plain_call, schemas)] for key in _nulls(value)), None)


def _arguments(calls: Any) -> Iterator[Any]:
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield function.get("arguments")


def _nulls(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            if each is None and key not in _MEANT:
                yield str(key)
            yield from _nulls(each)
    elif isinstance(value, list):
        for each in value:
            yield from _nulls(each)


def _plain_call(call: Any) -> Any:
    """Return a call or a tool without null keys; arguments that are JSON text of an object become the object."""
    if not isinstance(call, Mapping):
        return call
    kept = _without_nulls(call)
    if isinstance(kept.get("function"), Mapping):
        kept["function"] = _plain_call(kept["function"])
    if isinstance(arguments := kept.get("arguments"), str):
        parsed = _parse(arguments)
        kept["arguments"] = parsed if isinstance(parsed, dict) else arguments
    return kept


def _without_nulls(given: Any) -> Any:
    return {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else given


class _Trailing:
    """JSON that more text follows."""


def _parse(text: str) -> Any:
    """Return the value of JSON text, _Trailing if more text follows it, None if it is not JSON."""
    text = text.strip()
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return value if end == len(text) else _Trailing()


def _is_like_messages(text: str) -> bool:
    return _STARTS.match(text) is not None and _ROLE.search(text) is not None


def _message_problem(message: Any, sees: bool) -> str | None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return f"a message without a role ({str(message)[:60]})"
    content = message.get("content")
    if content is None or isinstance(content, str):
        return None
    if isinstance(content, Mapping | bytes) or not hasattr(content, "__iter__"):
        return f"a message whose content is neither text nor a list of parts ({str(content)[:60]})"
    kinds = {part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content}
    if other := kinds - ({"text", "image", "image_url"} if sees else {"text"}):
        allowed = "text and images" if sees else "text"
        return f"a message with {', '.join(map(str, other))}, where only {allowed} can be trained on,"
    return None
