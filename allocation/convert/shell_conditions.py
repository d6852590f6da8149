"""Conditions of a shell script: `[ ... ]`, `[[ ... ]]` and the patterns of `case`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from allocation.convert.shell_scope import ShellWord, Unknown
from allocation.convert.shell_syntax import Node
from allocation.convert.shell_words import Words

type Status = bool | None  # None: the script alone does not tell

_INTEGERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda x, y: x == y,
    "-ne": lambda x, y: x != y,
    "-lt": lambda x, y: x < y,
    "-le": lambda x, y: x <= y,
    "-gt": lambda x, y: x > y,
    "-ge": lambda x, y: x >= y,
}


def check_words(words: Sequence[ShellWord]) -> Status:
    """Return the result of the command `[` or `test`."""
    parts = list(words[1:])
    if words[0].text == "[" and parts and parts[-1].text == "]":
        parts.pop()
    negated = False
    while len(parts) > 1 and parts[0].text == "!":
        parts, negated = parts[1:], not negated
    if len(parts) == 1:
        status: Status = None if parts[0].unknown else bool(parts[0].text)
    elif len(parts) == 2:
        status = _check_one(parts[0].text, parts[1])
    elif len(parts) == 3:
        status = _check_two(parts[0], parts[1].text, parts[2])
    else:
        status = None if parts else False
    return None if status is None else status != negated


def check_expression(node: Node, words: Words) -> Status:
    """Return the result of an expression of `[[ ... ]]`."""
    match node["Type"]:
        case "ParenTest":
            return check_expression(node["X"], words)
        case "Word":
            value = words.value(node)
            return None if value.unknown else bool(value.text)
        case "UnaryTest" if node["Op"] == "!":
            status = check_expression(node["X"], words)
            return None if status is None else not status
        case "UnaryTest":
            return _check_one(node["Op"], words.value(node["X"]))
    if node["Op"] in ("&&", "||"):
        decides = node["Op"] == "||"
        first = check_expression(node["X"], words)
        if first == decides:
            return first
        second = check_expression(node["Y"], words)
        return second if first is not None or second == decides else None
    left, right = words.value(node["X"]), node["Y"]
    if node["Op"] in ("=", "==", "!="):
        same = matches(left, right, words)
        return None if same is None else same == (node["Op"] != "!=")
    return _check_two(left, node["Op"], words.value(right))


def matches(subject: ShellWord, pattern: Node, words: Words) -> Status:
    """Return whether a text matches a pattern."""
    if words.spell(pattern) == "*":
        return True
    try:
        return None if subject.unknown else bool(words.pattern(pattern).match(subject.text))
    except Unknown:
        return None


def _check_one(name: str, word: ShellWord) -> Status:
    if name not in ("-z", "-n"):
        return None  # files, variables and options
    known = _is_filled(word)
    return None if known is None else known == (name == "-n")


def _check_two(left: ShellWord, name: str, right: ShellWord) -> Status:
    if left.unknown or right.unknown:
        return None
    if name in ("=", "==", "!="):
        return (left.text == right.text) == (name != "!=")
    if name in _INTEGERS and all(re.fullmatch(r"\s*[-+]?\d{1,18}\s*", word.text) for word in (left, right)):
        return _INTEGERS[name](int(left.text), int(right.text))
    return None


def _is_filled(word: ShellWord) -> Status:
    """Return whether a word has text; one that is only partly unknown has some."""
    return (None if word.whole or "$" in word.text[:1] else True) if word.unknown else bool(word.text)
