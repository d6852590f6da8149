"""Other systems' settings as text: YAML, Hydra's `key=value` and command lines, each value with its position.

Nothing is evaluated. YAML is only composed: every scalar stays a string, and tags create no objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import yaml

from allocation.convert.shell import calculate, with_names, words
from allocation.diagnostics import Finding, Source, Span
from allocation.language.syntax import LARGEST
from allocation.plan import ParallelSizes
from allocation.registry import run_rules

LONGEST = 200_000
MOST_SETTINGS = 20_000
DEEPEST = 40
LONGEST_VALUE = 10_000
LONGEST_REFERRED = 1_000

_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w.-]*)=(.*)", re.S)
_FIRST_OVERRIDE = re.compile(  # of a line, or of a command on one line
    r"^[ \t]*(?:\S{0,99}python[\d.]{0,9}[ \t][^\n=]{0,999}[ \t])?[\"']?[+~]{0,2}[A-Za-z_][\w.-]*=", re.M
)
_OPTION = re.compile(r"(?:\w+=)?\(?--([A-Za-z][\w-]*)(?:=(.*))?", re.S)
_NO_VALUE = re.compile(r"--|[)\\]$|\$\{\w+\[@\]")
_SEVERAL = (  # options with several values
    *("recompute-modules", "target-modules", "eval-prompt-data"),
    *("rollout-stop", "rollout-stop-token-ids"),
)
_FURTHER = re.compile(r"[\w/~][\w./:-]*")
_REFERENCE = re.compile(r"\\?\$(?:\{([A-Za-z_][\w.]*|\d)(?::-([^}]*))?\}|([A-Za-z_]\w*))")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_ONES = ParallelSizes()
NULL = ("", "null", "Null", "NULL", "~", "None", "none")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as written. `source` is its line, `span` its position in that line."""

    key: str
    value: str
    source: Source
    span: Span


@dataclass(eq=False)
class Unreadable(Exception):
    """Text that cannot be read as settings: the reason and the place."""

    reason: str
    source: Source
    span: Span | None = None


class Reading:
    """Settings by dotted key, and the findings that reading them collects.

    `variables` are the shell variables that the text itself sets. They are substituted, never evaluated.
    """

    def __init__(self, text: str, settings: dict[str, Setting], variables: dict[str, str] | None = None) -> None:
        self.text = text
        self.settings = settings
        self.variables = variables or {}
        self.findings: list[Finding] = []

    @classmethod
    def of_config(cls, text: str) -> Reading:
        """Read YAML or `key=value` overrides; a text that is neither becomes an error finding."""
        return cls._read_with(text, _overrides if _FIRST_OVERRIDE.search(text[:LONGEST]) else _yaml)

    @classmethod
    def of_command(cls, text: str) -> Reading:
        """Read `--option value` and `--option=value`; an option alone has the value `true`, the last one counts."""
        return cls._read_with(text, _options)

    @classmethod
    def _read_with(cls, text: str, parse: Callable[[str], Iterator[Setting]]) -> Reading:
        reading = cls(text, {})
        try:
            if len(text) > LONGEST:
                raise Unreadable(f"the settings have {len(text)} characters; the limit is {LONGEST}", Source(""))
            for setting in parse(text):
                reading.settings[setting.key] = setting
            reading.variables = _variables(text)
        except Unreadable as error:
            reading.settings = {}
            reading.report(unreadable=error)
        return reading

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
        """Return the first of the keys that is set, references to other keys (`${a.b}`) and variables filled in."""
        for key in keys:
            setting = self.settings.get(key)
            if setting and (value := self._fill(setting.value)) not in NULL:
                return Setting(setting.key, value, setting.source, setting.span)
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

    def _fill(self, value: str) -> str:
        value = with_names(value)
        for _ in range(8):
            filled = _REFERENCE.sub(self._look_up, value)
            if filled == value or len(filled) > LONGEST_VALUE:
                break
            value = filled
        return calculate(value)

    def _look_up(self, match: re.Match[str]) -> str:
        setting = self.settings.get(match[1] or match[3])
        known = {setting.key: setting.value} | self.variables if setting else self.variables
        return _substitute(match, known)


def _variables(text: str) -> dict[str, str]:
    """Return the shell variables that the text sets at the begin of its lines, in its order, with earlier ones
    filled in."""
    found: dict[str, str] = {}
    begins = False
    for word in words(text):
        begins = begins or word.first
        match = _VARIABLE.fullmatch(word.text) if begins else None
        if match and len(word.text) <= LONGEST_REFERRED:
            value = _REFERENCE.sub(lambda reference: _substitute(reference, found), with_names(_unquote(match[2])))
            found[match[1]] = calculate(value)
        begins = begins and word.text in ("export", "local")
    return found


def _substitute(reference: re.Match[str], known: Mapping[str, str]) -> str:
    """Return the value of a reference: `${NAME:-8}` is 8 if the text does not set NAME."""
    value = known.get(reference[1] or reference[3], reference[2] and _unquote(reference[2]))
    return reference[0] if value is None or len(value) > LONGEST_REFERRED else value


def number(text: str) -> int | None:
    """Return a count of at most 10^18 in plain digits, 0 included; None for anything else."""
    if not re.fullmatch(r"[0-9]{1,19}", text):
        return None
    value = int(text)
    return value if value <= LARGEST else None


def _unquote(text: str) -> str:
    """Return a value without its quotes and, as the last of an array, the parenthesis that closes it."""
    text = text.rstrip("\\")
    return (text if "(" in text else text.rstrip(")")).strip("\"'")


def _setting(text: str, key: str, value: str, start: int, end: int) -> Setting:
    begin = text.rfind("\n", 0, start) + 1
    stop = text.find("\n", start)
    line = text[begin : stop if stop >= 0 else len(text)]
    span = Span(start - begin, min(end, begin + len(line)) - begin)
    return Setting(key, value, Source(line, key), span)


def _overrides(text: str) -> Iterator[Setting]:
    for word in words(text):
        if match := _OVERRIDE.fullmatch(word.text):
            begin = text.find("=", word.start, word.end) + 1
            yield _setting(text, match[1], _unquote(match[2]), begin, word.end)
        elif " " in word.text and "=" in word.text:  # a command in quotes
            yield from _overrides(word.text)


def _options(text: str) -> Iterator[Setting]:
    found = list(words(text))
    for place, word in enumerate(found):
        match = _OPTION.fullmatch(word.text)
        if " --" in word.text or (match and " " in word.text and not match[2]):  # several in quotes
            yield from _options(word.text.partition("=")[2] if _VARIABLE.fullmatch(word.text) else word.text)
            continue
        if match is None:
            continue
        key, given = match[1].replace("_", "-"), match[2]
        most = 99 if key in _SEVERAL else 1
        after = found[place + 1 : place + 1 + most]
        values = list(takewhile(lambda other: not (other.first or _NO_VALUE.match(other.text)), after))
        if given is not None or not values:
            yield _setting(text, key, _unquote(given) if given else "true", word.start, word.end)
            continue
        several = [values[0], *takewhile(lambda other: _FURTHER.fullmatch(other.text), values[1:])]
        value = f"[{','.join(each.text for each in several)}]" if len(several) > 1 else _unquote(values[0].text)
        yield _setting(text, key, value, values[0].start, values[0].end)


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
        # A merge key comes first: what stands next to it counts.
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
