"""Other systems' settings as text: YAML, Hydra's `key=value` and command lines, each value with its position.

YAML is only composed: every scalar stays a string, and tags create no objects. Scripts are read, not run
(`allocation/convert/shell.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import yaml

from allocation.convert.shell import Command, read_script
from allocation.convert.shell_scope import ShellWord
from allocation.convert.shell_syntax import ShellSyntaxError
from allocation.diagnostics import Finding, Source, Span
from allocation.language.syntax import LARGEST
from allocation.plan import ParallelSizes
from allocation.registry import run_rules

LONGEST = 200_000
MOST_SETTINGS = 20_000
DEEPEST = 40
LONGEST_VALUE = 10_000

_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w.-]*)=(.*)", re.S)
_FIRST_OVERRIDE = re.compile(  # of a line, or of a command on one line
    r"^[ \t]*(?:\S{0,99}python[\d.]{0,9}[ \t][^\n=]{0,999}[ \t])?[\"']?[+~]{0,2}[A-Za-z_][\w.-]*=", re.M
)
_PLAIN = re.compile(
    r"(?:\s*+[+~]{0,2}[A-Za-z_][\w.-]*+=[^\s$\"'\\`]*+(?=\s|$))++\s*"
)  # settings without a shell's signs
_OPTION = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.S)
_NO_VALUE = re.compile(r"--|\$\{\w+\[@\]")
_SEVERAL = (  # options with several values
    *("recompute-modules", "target-modules", "eval-prompt-data"),
    *("rollout-stop", "rollout-stop-token-ids"),
)
_REFERENCE = re.compile(r"\\?\$\{([A-Za-z_][\w.]*)\}")
_PROGRAMS = (re.compile(r"train\w*\.py$"), re.compile(r"\.py$|^-m$"))  # of trainings, the likeliest first
type _Parser = Callable[[str, Command], Iterator[Setting]]
_ONES = ParallelSizes()
NULL = ("", "null", "Null", "NULL", "~", "None", "none")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as written. `source` is its line, `span` its position in that line.

    `unknown` names the dependencies of the value beyond the text, such as a variable that a script does not set.
    """

    key: str
    value: str
    source: Source
    span: Span
    unknown: tuple[str, ...] = ()


@dataclass(eq=False)
class Unreadable(Exception):
    """Text that cannot be read as settings: the reason and the place."""

    reason: str
    source: Source
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Unread:
    """Words of a script's command that may be settings, and their dependencies."""

    text: str
    line: int
    reasons: tuple[str, ...]


class Reading:
    """Settings by dotted key, and the findings that reading them collects.

    Of a script, `unread` are the parts of its command that the script alone does not give, `included` the files that it
    reads, and `trainings` the lines of its commands if their settings differ.
    """

    def __init__(self, text: str, settings: dict[str, Setting]) -> None:
        self.text = text
        self.settings = settings
        self.findings: list[Finding] = []
        self.unread: list[Unread] = []
        self.included: list[str] = []
        self.trainings: list[int] = []

    @classmethod
    def of_config(cls, text: str) -> Reading:
        """Read YAML or `key=value` overrides; a text that is neither becomes an error finding."""
        if _PLAIN.fullmatch(text[:LONGEST]):
            return cls._read_with(text, lambda reading: _plain(text))
        is_script = _FIRST_OVERRIDE.search(text[:LONGEST])
        return cls._read_with(text, lambda reading: reading._read_script(_overrides) if is_script else _yaml(text))

    @classmethod
    def of_command(cls, text: str) -> Reading:
        """Read `--option value` and `--option=value`; an option alone has the value `true`, the last one counts."""
        return cls._read_with(text, lambda reading: reading._read_script(_options))

    @classmethod
    def _read_with(cls, text: str, parse: Callable[[Reading], Iterator[Setting]]) -> Reading:
        reading = cls(text, {})
        try:
            if len(text) > LONGEST:
                raise Unreadable(f"the settings have {len(text)} characters; the limit is {LONGEST}", Source(""))
            for setting in parse(reading):
                reading.settings[setting.key] = setting
        except Unreadable as error:
            reading.settings = {}
            reading.report(unreadable=error)
        return reading

    def _read_script(self, parse: _Parser) -> Iterator[Setting]:
        """Yield the settings of a script's training, or of all of its commands if none starts a program."""
        try:
            script = read_script(self.text)
        except ShellSyntaxError as error:
            place = _setting(self.text, "", "", error.place, error.place + 1)
            raise Unreadable(error.reason, Source(place.source.text), place.span) from error
        self.included = script.included
        found = [(command, settings) for command in script.commands if (settings := list(parse(self.text, command)))]
        started = [
            [(command, settings) for command, settings in found if _starts(command, program)] for program in _PROGRAMS
        ]
        chosen = next(filter(None, started), found)
        if chosen is not found:
            several = {tuple((each.key, each.value) for each in settings) for _, settings in chosen}
            self.trainings = [command.line for command, _ in chosen] if len(several) > 1 else []
        for command, settings in chosen:
            self.unread += _unread(command)
            yield from settings

    def report(self, **known: object) -> None:
        """Add the findings of the rules that need only `known`."""
        self.findings += run_rules(Source(""), **known)

    def has(self, *keys: str) -> bool:
        """Return whether one of the keys, or a key below it, has a value."""
        return any(
            setting.value not in NULL and (name == key or name.startswith(key + "."))
            for name, setting in self.settings.items()
            for key in keys
        )

    def find(self, *keys: str) -> Setting | None:
        """Return the first of the keys that is set, references to other keys (`${a.b}`) filled in."""
        for key in keys:
            setting = self.settings.get(key)
            if setting and (filled := self._fill(setting)).value not in NULL:
                return filled
        return None

    def value(self, *keys: str) -> str | None:
        """Return the value of the first of the keys that is set."""
        setting = self.find(*keys)
        return setting.value if setting else None

    def size(self, *keys: str, default: int = 1) -> int:
        """Return a positive integer; another value is an error finding and counts as the default."""
        setting = self.find(*keys)
        if setting is None:
            return default
        size = number(setting.value)
        if not size:
            self.report(size=setting)
        return size or default

    def sizes(self, keys: Mapping[str, str], default: ParallelSizes = _ONES) -> ParallelSizes:
        """Return sizes by the key of each, `default` where a key is not set."""
        return replace(default, **{name: self.size(key, default=getattr(default, name)) for name, key in keys.items()})

    def nothing(self, title: str, expected: str) -> tuple[str, list[Finding]]:
        """Return an empty allocation and the findings that explain why the text has no engine."""
        if not self.findings:
            self.report(title=title, expected=expected)
        return "", self.findings

    def _fill(self, setting: Setting) -> Setting:
        value, reasons = setting.value, list(setting.unknown)

        def look_up(match: re.Match[str]) -> str:
            other = self.settings.get(match[1])
            if other is None or len(other.value) > LONGEST_VALUE:
                return match[0]
            reasons.extend(other.unknown)
            return other.value

        for _ in range(8):
            filled = _REFERENCE.sub(look_up, value)
            if filled == value or len(filled) > LONGEST_VALUE:
                break
            value = filled
        return replace(setting, value=value, unknown=tuple(dict.fromkeys(reasons)))


def number(text: str) -> int | None:
    """Return a count of at most 10^18 in plain digits, 0 included; None for anything else."""
    if not re.fullmatch(r"[0-9]{1,19}", text):
        return None
    value = int(text)
    return value if value <= LARGEST else None


def _setting(text: str, key: str, value: str, start: int, end: int, unknown: tuple[str, ...] = ()) -> Setting:
    begin = text.rfind("\n", 0, start) + 1
    stop = text.find("\n", start)
    line = text[begin : stop if stop >= 0 else len(text)]
    span = Span(start - begin, min(end, begin + len(line)) - begin)
    if unknown and "$" not in value:  # the value of one branch
        value = f"$({value})"
    return Setting(key, value, Source(line, key), span, unknown)


def _starts(command: Command, program: re.Pattern[str]) -> bool:
    return any(program.search(word.text) for word in command.words)


def _unread(command: Command) -> Iterator[Unread]:
    """Yield the words behind a command's program that are wholly unknown, unless they are an option's value."""
    words = command.words
    first = next((at for at, word in enumerate(words) if any(p.search(word.text) for p in _PROGRAMS)), -1)
    for before, word in zip(words[max(first, 0) :], words[max(first, 0) + 1 :], strict=False):
        is_value = before.text.startswith("-") and "=" not in before.text and not _NO_VALUE.match(word.text)
        if not is_value and (word.whole or (word.unknown and re.search(r"\s", word.text) and "=" not in word.text)):
            yield Unread(word.text, command.line, word.unknown)


def _plain(text: str) -> Iterator[Setting]:
    for match in re.finditer(r"[+~]{0,2}([A-Za-z_][\w.-]*)=(\S*)", text):
        yield _setting(text, match[1], match[2], match.start(2), match.end(2))


def _overrides(text: str, command: Command) -> Iterator[Setting]:
    for word in command.words:
        if match := _OVERRIDE.fullmatch(word.text):
            begin = text.find("=", word.start, word.end) + 1 or word.start
            yield _setting(text, match[1], _unquote(match[2]), begin, word.end, word.unknown)


def _unquote(text: str) -> str:
    """Return a value without the quotes that Hydra would take off."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _options(text: str, command: Command) -> Iterator[Setting]:
    words = command.words
    for place, word in enumerate(words):
        match = _OPTION.fullmatch(word.text)
        if match is None:
            continue
        key, given = match[1].replace("_", "-"), match[2]
        most = 99 if key in _SEVERAL else 1
        after = words[place + 1 : place + 1 + most]
        values: list[ShellWord] = list(takewhile(lambda other: not _NO_VALUE.match(other.text), after))
        if given is not None or not values:
            yield _setting(text, key, _unquote(given) if given else "true", word.start, word.end, word.unknown)
            continue
        several = values if key in _SEVERAL else values[:1]
        value = _unquote(values[0].text) if len(several) == 1 else f"[{','.join(map(_item, several))}]"
        reasons = tuple(reason for each in (word, *several) for reason in each.unknown)
        yield _setting(text, key, value, values[0].start, values[0].end, reasons)


def _item(word: ShellWord) -> str:
    """Return a word as an item of a YAML list."""
    return word.text if re.fullmatch(r"[\w/~$.][\w./:$-]*", word.text) else json.dumps(word.text)


def dump(settings: Mapping[str, object]) -> str:
    """Return settings by dotted key as YAML."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value
    text: str = yaml.safe_dump(tree, sort_keys=False, width=1 << 20)
    return text


def _yaml(text: str) -> Iterator[Setting]:
    # Guides leave parts out with a line of three dots.
    text = re.sub(r"(?m)^[ \t]+\.{3}[ \t]*$", lambda match: " " * len(match[0]), text)
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        index, problem = mark.index if mark else 0, getattr(error, "problem", None) or error
        place = _setting(text, "", "", index, index + 1)
        raise Unreadable(f"this is not YAML: {problem}", Source(place.source.text), place.span) from error
    except RecursionError as error:
        raise Unreadable("the YAML is nested too deeply", Source("")) from error
    if not isinstance(root, yaml.MappingNode):
        raise Unreadable(
            "the text is neither YAML with keys nor `key=value` lines", Source(text[:80].partition("\n")[0])
        )
    yield from _flat(text, root, "", 0, iter(range(MOST_SETTINGS)))


def _flat(text: str, node: yaml.Node, key: str, depth: int, budget: Iterator[int]) -> Iterator[Setting]:
    """Yield every scalar and list below `node`; a list of scalars is written `[a,b]`. Aliases can repeat a node
    without end: each visit takes from the `budget`."""
    if depth > DEEPEST:
        raise Unreadable("the YAML is nested too deeply", Source(""))
    for _ in node.value if isinstance(node, yaml.SequenceNode) else (None,):
        if next(budget, None) is None:
            raise Unreadable(f"the text has more than {MOST_SETTINGS} settings; this is the limit", Source(""))
    start, end = node.start_mark.index, node.end_mark.index
    if isinstance(node, yaml.MappingNode):
        # A merge key comes first: keys next to it count.
        for name, value in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
            if isinstance(name, yaml.ScalarNode):
                below = key if name.value == "<<" else f"{key}.{name.value}" if key else name.value
                yield from _flat(text, value, below, depth + 1, budget)
    elif isinstance(node, yaml.SequenceNode):
        if all(isinstance(entry, yaml.ScalarNode) for entry in node.value):
            yield _setting(text, key, f"[{','.join(entry.value for entry in node.value)}]", start, end)
        else:
            for index, entry in enumerate(node.value):
                yield from _flat(text, entry, f"{key}.{index}", depth + 1, budget)
    else:
        yield _setting(text, key, node.value, start, end)
