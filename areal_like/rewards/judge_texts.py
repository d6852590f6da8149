"""The message to a judge, from a prompt and a response, and the reward, from the judge's answer."""

import json
import re
from collections.abc import Mapping
from typing import Any

from areal_like.core.config.schema import ChatJudgeConfig
from areal_like.core.types import Prompt, value_at

FIELDS = ("question", "answer", "response")
PLACEHOLDER = re.compile(r"\{(\w+)\}")  # other braces, as in JSON, are text


def fill(template: str, prompt: Prompt, response: str) -> str:
    """Return the template with its fields filled in; braces in the values stay as they are."""
    values = {"question": question_of(prompt), "answer": prompt.answer, "response": response}
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), template)


def question_of(prompt: Prompt) -> str:
    """Return the text of the prompt's messages without system messages; several messages have their roles."""
    messages = [message for message in prompt.messages() if message["role"] != "system"]
    texts = [_text(message.get("content")) for message in messages]
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))


def read_score(config: ChatJudgeConfig, answer: str) -> float | None:
    """Return the reward in an answer, from 0 to 1, or None if the answer has no score in the range."""
    found = _in_json(answer, config.score_field) if config.score_field else _find_last(answer, config.score_pattern)
    try:
        score = float(found)
    except (TypeError, ValueError):
        return None
    if isinstance(found, bool) or not config.score_min <= score <= config.score_max:
        return None
    return (score - config.score_min) / (config.score_max - config.score_min)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content)


def _find_last(answer: str, pattern: str) -> Any:
    found = re.findall(pattern, answer)
    return found[-1] if found else None


def _in_json(answer: str, field: str) -> Any:
    """Return a field of the JSON object in an answer; other text, such as a code fence, may surround the object."""
    start, end = answer.find("{"), answer.rfind("}")
    try:
        value = json.loads(answer[start : end + 1])
    except (ValueError, RecursionError):
        return None
    return value_at(value, field) if isinstance(value, Mapping) else None
