"""The prompt of each turn of a conversation: the earlier tokens unchanged, and the tokens of new messages.

A chat template renders a whole conversation, and may render an earlier answer differently from what the model
generated: many templates drop the thinking, trim blanks, or reformat tool calls, and even equal text may have other
tokens. Training uses the tokens that the server produced, so an answer is never rendered or encoded again. To find the
tokens that follow an answer, the template renders the conversation with a mark in its place; the text after the mark is
new.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from areal_like.data.tokenizer import Tokenizer, TokenizerError

type Message = Mapping[str, Any]

MOST_LEVELS = 254  # nesting of a JSON value that orjson writes; it reads 1024
_MARK = "\ue000turn\ue001"  # of Unicode's private use area


class Continuity(StrEnum):
    """Relation of a turn's prompt to the turn before it in its trajectory."""

    FIRST = "first"  # there is no earlier turn
    EXACT = "exact"  # equal to the rendered conversation, token for token
    RETOKENISED = "retokenised"  # equal to the rendered text, which would encode to other tokens
    REWRITTEN = "rewritten"  # the template would render earlier turns differently; they stay as generated
    DEPLOYED = "deployed"  # the template renders earlier turns differently, so the prompt starts a new trajectory
    COMPACTED = "compacted"  # the conversation starts with an earlier answer, its summary: a trajectory of its own
    BRANCH = "branch"  # the conversation does not continue an earlier turn: a trajectory of its own


@dataclass(frozen=True)
class TemplateContext:
    """Template inputs other than messages: the tools' JSON schemas, and variables such as `enable_thinking`."""

    tools: Sequence[dict[str, Any]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def parsed_arguments(text: str) -> Any:
    """Parse a tool call's arguments from JSON; return the text itself if it is not JSON or cannot be sent."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return text if is_too_deep(value) else value


def is_too_deep(value: Any) -> bool:
    """Return whether a value from JSON is nested too deeply for templates to write it again."""
    try:
        orjson.dumps(value)
    except TypeError:
        return True
    return False


def text_of(arguments: Any) -> str:
    """Return the arguments of a tool call as JSON; a text is a model's output that is not JSON, and stays."""
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


def as_sent(message: Message) -> Message:
    """Return a message with the arguments of its tool calls as text."""
    calls = [
        {**call, "function": {"name": call["function"]["name"], "arguments": text_of(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def opening(tokenizer: Tokenizer, messages: Sequence[Message], context: TemplateContext) -> list[int]:
    """Return the tokens of a new conversation, including its images; raises TokenizerError."""
    return tokenizer.encode_chat(messages, _tools(context), **context.arguments)


def following(
    tokenizer: Tokenizer, earlier: Sequence[int], messages: Sequence[Message], answered: int, context: TemplateContext
) -> tuple[list[int], Continuity]:
    """Return the part of a prompt that follows `earlier`, and how the whole prompt relates to the chat template.

    `earlier` are the tokens of the conversation up to `messages[answered]`, a generated message, inclusive. Raises
    TokenizerError if the template rejects the conversation.
    """
    marked = [*messages[:answered], {"role": "assistant", "content": _MARK}, *messages[answered + 1 :]]
    text = tokenizer.render_chat(marked, _tools(context), **context.arguments)
    if text.count(_MARK) != 1:
        raise TokenizerError("the chat template changes the text of an assistant's message")
    new = tokenizer.encode_rendered(text.partition(_MARK)[2], messages[answered + 1 :])
    if earlier[-1] in tokenizer.eos_token_ids:
        new = _without_end(tokenizer, new, earlier[-1], lambda: _closing(tokenizer, marked[: answered + 1], context))
    return new, _continuity(tokenizer, [*earlier, *new], messages, context)


def _without_end(
    tokenizer: Tokenizer, new: list[int], generated: int, closing: Callable[[], list[int]] | None
) -> list[int]:
    """Remove the template's end of message from `new`, because the model has generated an end token.

    The first end token of `new` may also start the next message, as `<|user|>` of GLM-4. It is removed if the model has
    generated it, or if it ends the conversation without the next message, too: `closing`.
    """
    size = next((place for place, token in enumerate(new, 1) if token in tokenizer.eos_token_ids), None)
    if size is None:
        return new  # the template ends messages differently
    if new[size - 1] == generated and not tokenizer.decode(new[: size - 1], special=True).strip():
        return new[size:]
    if closing is None or tokenizer.decode(new[: size - 1]).strip() or closing()[:size] != new[:size]:
        return new
    return _without_end(tokenizer, new[size:], generated, None)  # `generated` may start the next message


def _closing(tokenizer: Tokenizer, messages: Sequence[Message], context: TemplateContext) -> list[int]:
    """Return the tokens after the mark if no message follows it; none if the template rejects such a conversation."""
    arguments = {**context.arguments, "add_generation_prompt": False}
    try:
        text = tokenizer.render_chat(messages, _tools(context), **arguments)
        return tokenizer.encode_rendered(text.partition(_MARK)[2], [])
    except TokenizerError:
        return []


def _continuity(
    tokenizer: Tokenizer, prompt: list[int], messages: Sequence[Message], context: TemplateContext
) -> Continuity:
    whole = opening(tokenizer, messages, context)
    if whole == prompt:
        return Continuity.EXACT
    same_text = tokenizer.decode(whole, special=True) == tokenizer.decode(prompt, special=True)
    return Continuity.RETOKENISED if same_text else Continuity.REWRITTEN


def _tools(context: TemplateContext) -> list[dict[str, Any]] | None:
    return list(context.tools) if context.tools else None
