"""Variables of a shell script as far as its text gives them, and whole numbers calculated with them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from allocation.convert.shell_syntax import Node

LONGEST_VALUE = 10_000
_LARGEST = 2**63 - 1


class Unknown(Exception):
    """Raised for a value that depends on more than the script: `reasons` name it."""

    def __init__(self, *reasons: str) -> None:
        super().__init__(*reasons)
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class ShellWord:
    """A word without its quotes, and its position in the text.

    `unknown` names the dependencies of an unknown part; that part is spelled as in the script. `whole`: nothing of the
    word is known.
    """

    text: str
    unknown: tuple[str, ...] = ()
    start: int = 0
    end: int = 0
    whole: bool = False

    def same_as(self, other: object) -> bool:
        """Return whether the other word has this word's value, wherever it stands."""
        return isinstance(other, ShellWord) and (self.text, self.unknown) == (other.text, other.unknown)


type Variable = ShellWord | tuple[ShellWord, ...] | None  # None: the script unsets it


@dataclass
class Scope:
    """The variables that a script sets, and the arguments of the function that runs; None outside functions."""

    variables: dict[str, Variable] = field(default_factory=dict)
    arguments: tuple[ShellWord, ...] | None = None

    def copy(self) -> Scope:
        """Return a scope whose variables can be set without effect on this one."""
        return Scope(dict(self.variables), self.arguments)

    def has(self, name: str) -> bool:
        """Return whether the script has set or unset the variable, or passes the argument."""
        if name.isdigit():
            return self.arguments is not None
        return name in self.variables

    def get(self, name: str) -> Variable:
        """Return a variable or a numbered argument, None for an unset one."""
        if name.isdigit():
            given = self.arguments or ()
            return given[int(name) - 1] if 0 < int(name) <= len(given) else None
        return self.variables.get(name)

    def set(self, name: str, value: Variable) -> None:
        """Set a variable; a text that grows without end is unknown."""
        if isinstance(value, ShellWord) and len(value.text) > LONGEST_VALUE:
            value = ShellWord(f"${name}", (f"${name}, whose text is too long",), value.start, value.end)
        self.variables[name] = value

    def forget(self, name: str, reason: str) -> None:
        """Make a variable unknown."""
        self.set(name, ShellWord(f"${name}", (reason,), whole=True))

    def text_of(self, name: str) -> str:
        """Return the text of a variable. Raises Unknown."""
        value = self.get(name)
        if not isinstance(value, ShellWord):
            raise Unknown(unset(name))
        if value.unknown:
            raise Unknown(*value.unknown)
        return value.text

    def merge(self, others: Sequence[Scope], reason: str) -> None:
        """Take the variables of the branches of a condition, if the script alone does not decide which branch runs."""
        first, *rest = [other.variables for other in others]
        for name in dict.fromkeys(name for each in (first, *rest) for name in each):
            merged: Variable = first.get(name)
            missing = name not in first
            for other in rest:
                if missing != (name not in other) or not _same(merged, other.get(name)):
                    merged = _merge_values(name, merged, other.get(name), reason)
                    missing = False
            first[name] = merged
        self.variables = first


def unset(name: str) -> str:
    """Return the reason why a variable is unknown that the script does not set."""
    return f"${name}, which the script does not set"


def _same(one: Variable, other: Variable) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(a.same_as(b) for a, b in zip(one, other, strict=True))
    return one.same_as(other) if isinstance(one, ShellWord) else one is None and other is None


def _merge_values(name: str, one: Variable, other: Variable, reason: str) -> Variable:
    """Return a variable of two possible values: of arrays, the words that only one of them has are unknown."""
    if isinstance(one, tuple) or isinstance(other, tuple):
        lists = [each if isinstance(each, tuple) else (each,) if each else () for each in (one, other)]
        return tuple(_words_of_both(lists[0], lists[1], reason))
    known = one if isinstance(one, ShellWord) else other
    start, end = (known.start, known.end) if isinstance(known, ShellWord) else (0, 0)
    reasons = tuple(r for each in (one, other) if isinstance(each, ShellWord) for r in each.unknown)
    return ShellWord(f"${name}", tuple(dict.fromkeys((*reasons, reason))), start, end, whole=True)


def _words_of_both(one: Sequence[ShellWord], other: Sequence[ShellWord], reason: str) -> Iterator[ShellWord]:
    shared = [word for word in one if any(word.same_as(another) for another in other)]
    for word in (*one, *(word for word in other if not any(word.same_as(another) for another in one))):
        if any(word.same_as(another) for another in shared):
            yield word
        else:
            reasons = tuple(dict.fromkeys((*word.unknown, reason)))
            yield ShellWord(word.text, reasons, word.start, word.end, word.whole)


def as_words(value: Variable) -> tuple[ShellWord, ...]:
    """Return the words of an array, or the one of a text."""
    return value if isinstance(value, tuple) else () if value is None else (value,)


def append_text(name: str, before: Variable, there: bool, value: ShellWord) -> ShellWord:
    """Return the text of `NAME+=value`."""
    if not there:
        before = ShellWord(f"${name}", (unset(name),))
    text = before if isinstance(before, ShellWord) else ShellWord("")
    return ShellWord(text.text + value.text, (*text.unknown, *value.unknown), value.start, value.end)


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}


def calculate(node: Node, scope: Scope, text_of: Callable[[Node], str]) -> int:
    """Return the result of an arithmetic expression; `text_of` expands its words. Raises Unknown."""
    match node["Type"]:
        case "Word":
            return _number(text_of(node), scope)
        case "ParenArithm":
            return calculate(node["X"], scope, text_of)
        case "UnaryArithm":
            return _unary(node, scope, text_of)
        case "BinaryArithm":
            return _check_size(_binary(node, scope, text_of))
    raise Unknown("an expression of another kind")


def _number(text: str, scope: Scope, depth: int = 0) -> int:
    text = text.strip()
    if re.fullmatch(r"[-+]?[1-9]\d{0,18}|0", text):
        return int(text)
    if re.fullmatch(r"0[xX][0-9a-fA-F]{1,15}", text):
        return int(text, 16)
    if not re.fullmatch(r"[A-Za-z_]\w*", text) or depth > 20:
        raise Unknown(f"the number `{text[:40]}`")
    value = scope.text_of(text)
    return _number(value, scope, depth + 1) if value else 0


def _check_size(value: int) -> int:
    if abs(value) > _LARGEST:
        raise Unknown("a number that is too large")
    return value


def _unary(node: Node, scope: Scope, text_of: Callable[[Node], str]) -> int:
    name, value = node["Op"], calculate(node["X"], scope, text_of)
    if name in ("++", "--"):
        changed = value + (1 if name == "++" else -1)
        _assign(node["X"], changed, scope, text_of)
        return value if node.get("Post") else changed
    return {"-": -value, "+": value, "!": int(not value), "~": ~value}[name]


def _binary(node: Node, scope: Scope, text_of: Callable[[Node], str]) -> int:
    name, x, y = node["Op"], node["X"], node["Y"]
    if name == "?":
        return calculate(y["X"] if calculate(x, scope, text_of) else y["Y"], scope, text_of)
    if name in ("&&", "||"):
        first = bool(calculate(x, scope, text_of))
        return int(first if first == (name == "||") else bool(calculate(y, scope, text_of)))
    if name == ",":
        calculate(x, scope, text_of)
        return calculate(y, scope, text_of)
    if name == "=":
        return _assign(x, calculate(y, scope, text_of), scope, text_of)
    if name.endswith("=") and name[:-1] in ("+", "-", "*", "/", "%"):
        changed = _check_size(_operate(name[:-1], calculate(x, scope, text_of), calculate(y, scope, text_of)))
        return _assign(x, changed, scope, text_of)
    return _operate(name, calculate(x, scope, text_of), calculate(y, scope, text_of))


def _operate(name: str, x: int, y: int) -> int:
    if name in _OPERATIONS:
        return int(_OPERATIONS[name](x, y))
    if name in ("/", "%") and y:
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)  # rounded towards 0, as in C
        return quotient if name == "/" else x - y * quotient
    if name in ("<<", ">>") and 0 <= y < 64:
        return x << y if name == "<<" else x >> y
    if name == "**" and 0 <= y < 64:
        return int(x**y)
    raise Unknown(f"the operation {x} {name} {y}")


def _assign(target: Node, value: int, scope: Scope, text_of: Callable[[Node], str]) -> int:
    name = text_of(target).strip()
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise Unknown(f"an assignment to `{name[:40]}`")
    scope.set(name, ShellWord(str(value)))
    return value
