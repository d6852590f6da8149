"""Runs the LALR(1) tables that Lark made: text in, values out, in linear time.

A reduce calls the action of its rule, so no tree is built in between. The lexer asks at each state only for
the terminals that may follow there; that is how `d4` can be a name in one place and a dimension in another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

END = "$END"


class Token(NamedTuple):
    """A piece of the text; `start` and `end` count characters from 0, `end` exclusive."""

    kind: str
    text: str
    start: int
    end: int


class Unexpected(Exception):
    """The text stops fitting the grammar at `position`; `expected` are the terminals that would have fitted."""

    def __init__(self, position: int, expected: tuple[str, ...]) -> None:
        super().__init__(position, expected)
        self.position = position
        self.expected = expected


class Parser:
    """The tables with one action per rule: `actions[rule name](*values)`."""

    def __init__(self, actions: Mapping[str, Callable[..., Any]]) -> None:
        tables = json.loads(Path(__file__).with_name("tables.json").read_text())
        self._states: list[dict[str, Any]] = tables["states"]
        self._start: dict[str, int] = tables["start"]
        self._end: dict[str, int] = tables["end"]
        self._rules = [(origin, actions.get(name), size, kept) for origin, name, size, kept in tables["rules"]]
        self._terminals: dict[str, str] = tables["terminals"]
        self._ignored = "|".join(self._terminals[name] for name in tables["ignore"])
        self._matchers: list[Callable[[str, int], re.Match[str]] | None] = [None] * len(self._states)

    def parse(self, text: str, start: str, position: int = 0) -> Any:
        """The value of the rule `start` for `text` from `position` to its end. Raises `Unexpected`."""
        states = self._states
        state = self._start[start]
        end = self._end[start]
        state_stack = [state]
        values: list[Any] = []
        token = self._next(text, position, state)
        while True:
            action = states[state].get(token.kind)
            if action is None:
                if state == end and token.kind == END:
                    return values[0]
                raise Unexpected(token.start, self._accepted(state_stack))
            if action.__class__ is list:
                state = action[0]
                state_stack.append(state)
                values.append(token)
                token = self._next(text, token.end, state)
                continue
            origin, build, size, kept = self._rules[action]
            children = values[-size:]
            del values[-size:], state_stack[-size:]
            arguments: list[Any] = []
            for index in kept:
                child = children[index]
                if child.__class__ is list:
                    arguments += child
                else:
                    arguments.append(child)
            if build is not None:
                values.append(build(*arguments))
            else:
                values.append(arguments[0] if origin[0] != "_" else arguments)
            state = states[state_stack[-1]][origin][0]
            state_stack.append(state)

    def _accepted(self, state_stack: list[int]) -> tuple[str, ...]:
        """The terminals that fit next. A LALR table may reduce on others too, so each is tried to its shift."""
        top = self._states[state_stack[-1]]
        return tuple(name for name in self._terminals if name in top and self._shifts(name, [*state_stack]))

    def _shifts(self, terminal: str, state_stack: list[int]) -> bool:
        while isinstance(action := self._states[state_stack[-1]].get(terminal), int):
            origin, _, size, _ = self._rules[action]
            del state_stack[-size:]
            state_stack.append(self._states[state_stack[-1]][origin][0])
        return action is not None

    def _next(self, text: str, position: int, state: int) -> Token:
        match = (self._matchers[state] or self._matcher(state))(text, position)
        end = match.end()
        kind = match.lastgroup
        if kind is not None:
            return Token(kind, match[kind], match.start(kind), end)
        return Token(END if end == len(text) else "", "", end, end)

    def _matcher(self, state: int) -> Callable[[str, int], re.Match[str]]:
        terminals = "|".join(f"(?P<{k}>{p})" for k, p in self._terminals.items() if k in self._states[state])
        pattern = f"(?:{self._ignored})?(?:{terminals or '(?!)'})?"
        # Both parts may be missing, so the pattern matches everywhere: `match` is never None.
        matcher = cast("Callable[[str, int], re.Match[str]]", re.compile(pattern).match)
        self._matchers[state] = matcher
        return matcher
