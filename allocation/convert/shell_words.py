"""Expansion of a shell script's words: parameters, quotes and arithmetic, as far as the script alone gives them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate

from allocation.convert.shell_scope import Scope, ShellWord, Unknown, Variable, as_words, calculate, unset
from allocation.convert.shell_syntax import Node, end_of, start_of

_BRACES = re.compile(r"(?<!\\)\{[^{}\s]*(,|\.\.)[^{}\s]*\}")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_ALONE = re.compile(r"\$\{?[\w@\[\]]+\}?")
_HOME = "~"
_LONGEST_MATCHED = 2_000
_MOST_NUMBERS = 10_000


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a word: text, or the words of an array; `split` text is separated at its spaces."""

    words: tuple[ShellWord, ...]
    split: bool = False


@dataclass
class Words:
    """Expands the words of `text` with the variables of `scope`; `substitute` returns the output of `$(...)`.

    `place` is the position of a text that the script evaluates, which its words have instead of their own.
    """

    text: str
    scope: Scope
    substitute: Callable[[Node], ShellWord]
    place: tuple[int, int] | None = None

    def fields(self, word: Node) -> Iterator[ShellWord]:
        """Yield the words that a word of a command becomes: none, one or several."""
        start, end = start_of(word), end_of(word)
        parts = [part for node in word["Parts"] for part in self._parts(node, split=True)]
        found: list[list[ShellWord]] = []
        glued = False  # to the field before
        for part in parts:
            pieces = [piece for each in part.words for piece in (_split(each) if part.split else [each])]
            spaces = part.split and bool(part.words) and not part.words[0].unknown
            if spaces and part.words[0].text[:1].isspace():
                glued = False
            for place, piece in enumerate(pieces):
                if not glued or place:
                    found.append([])
                found[-1].append(piece)
                glued = True
            if spaces and part.words[-1].text[-1:].isspace():
                glued = False
        for pieces in found:
            own = pieces[0] if len(pieces) == 1 and pieces[0].end else None
            start_and_end = self.place or ((own.start, own.end) if own else (start, end))
            yield _join(pieces, *start_and_end, whole=all(piece.whole for piece in pieces))

    def value(self, word: Node | None) -> ShellWord:
        """Return the one text that a word becomes where the shell does not split it."""
        if word is None:
            return ShellWord("")
        parts = (part for node in word["Parts"] for part in self._parts(node, split=False))
        pieces = [piece for part in parts for piece in _space_out(part.words)]
        place = self.place or (start_of(word), end_of(word))
        return _join(pieces, *place, whole=bool(pieces) and all(piece.whole for piece in pieces))

    def known_text(self, word: Node | None) -> str:
        """Return the text of a word. Raises Unknown."""
        value = self.value(word)
        if value.unknown:
            raise Unknown(*value.unknown)
        return value.text

    def pattern(self, word: Node) -> re.Pattern[str]:
        """Return the pattern that a word of `case` or `[[ ]]` is; quoted characters stand for themselves."""
        glob = ""
        for node in word["Parts"]:
            text = self.known_text({**word, "Parts": [node]})
            if node["Type"] == "ExtGlob":
                raise Unknown(f"the pattern `{text[:40]}`")
            glob += text if node["Type"] == "Lit" else re.sub(r"([*?\[])", r"[\1]", text)
        return re.compile(translate(glob), re.S)

    def number(self, expression: Node) -> int:
        """Return the result of an arithmetic expression. Raises Unknown."""
        return calculate(expression, self.scope, self.known_text)

    def spell(self, node: Node) -> str:
        """Return a node as the script has it."""
        return self.text[start_of(node) : end_of(node)]

    def _parts(self, node: Node, *, split: bool, in_quotes: bool = False) -> Iterator[_Part]:
        match node["Type"]:
            case "Lit":
                yield _literal(node.get("Value", ""), in_quotes)
            case "SglQuoted":
                text = node.get("Value", "")
                yield _Part((ShellWord(_unescape(text) if node.get("Dollar") is True else text),))
            case "DblQuoted":
                for child in node.get("Parts") or ():
                    yield from (part for part in self._parts(child, split=False, in_quotes=True) if part.words)
                if not node.get("Parts"):
                    yield _Part((ShellWord(""),))
            case "ParamExp":
                yield self._guard(node, lambda: self._parameter(node, split), split=split)
            case "ArithmExp":
                yield self._guard(node, lambda: ShellWord(str(self.number(node["X"]))))
            case "CmdSubst":
                yield self._guard(node, lambda: self.substitute(node), split=split)
            case _:
                yield self._guard(node, lambda: self._refuse(node))

    def _guard(self, node: Node, expand: Callable[[], Variable], *, split: bool = False) -> _Part:
        try:
            value = expand()
        except Unknown as unknown:
            spelled = self.spell(node)
            reasons = tuple(unknown.reasons) or (f"`{spelled[:60]}`",)
            return _Part((ShellWord(spelled, reasons, whole=True),))
        return _Part(value if isinstance(value, tuple) else (value or ShellWord(""),), split)

    def _refuse(self, node: Node) -> Variable:
        raise Unknown(f"`{self.spell(node)[:60]}`")

    def _parameter(self, node: Node, split: bool) -> Variable:
        name = node["Param"]["Value"]
        several = self._several(node, name)
        if several is not None:
            joined = (node.get("Index") and self.spell(node["Index"]) == "*") or name == "*"
            if node.get("Length"):
                return ShellWord(str(len(several)))
            if node.get("Slice") or node.get("Repl") or node.get("Excl"):
                raise Unknown(f"`{self.spell(node)[:60]}`")
            if not (node.get("Exp") and not several):
                return _join(list(_space_out(several)), 0, 0) if joined and not split else several
        if node.get("Excl"):
            name, node = self.scope.text_of(name), {**node, "Excl": False}
        value, there = self._one(node, name)
        return self._change(node, name, value, there)

    def _several(self, node: Node, name: str) -> tuple[ShellWord, ...] | None:
        """Return the words of `$@`, `${NAME[@]}` or `${NAME[*]}`, None for a parameter of another kind."""
        if name in ("@", "*"):
            return self.scope.arguments or ()
        if not node.get("Index") or self.spell(node["Index"]) not in ("@", "*"):
            return None
        if not self.scope.has(name) and not node.get("Exp"):
            raise Unknown(unset(name))
        return as_words(self.scope.get(name))

    def _one(self, node: Node, name: str) -> tuple[ShellWord | None, bool]:
        """Return the text of a parameter, None for an unset one, and whether the script decides that."""
        if name == "#" and self.scope.arguments is not None:
            return ShellWord(str(len(self.scope.arguments))), True
        if name == "HOME" and not self.scope.has(name):
            return ShellWord(_HOME), True
        value = self.scope.get(name)
        if isinstance(value, tuple):
            index = self.number(node["Index"]) if node.get("Index") else 0
            return (value[index] if -len(value) <= index < len(value) else None), True
        return value, self.scope.has(name)

    def _change(self, node: Node, name: str, value: ShellWord | None, there: bool) -> ShellWord:
        operator, word = (node.get("Exp") or {}).get("Op"), (node.get("Exp") or {}).get("Word")
        if operator in ("-", ":-", "=", ":=", "+", ":+") and not (value and value.unknown):
            empty = value is None or (":" in operator and not value.text)
            if operator in ("+", ":+"):
                return ShellWord("") if empty else self.value(word)
            if empty:
                chosen = self.value(word)
                if "=" in operator:
                    self.scope.set(name, chosen)
                return chosen
            operator = None
        elif value is None and there and operator is None:
            value = ShellWord("")
        if value is None:
            raise Unknown(unset(name))
        if value.unknown:
            if any(node.get(key) for key in ("Exp", "Repl", "Slice", "Length")) and operator not in ("-", ":-"):
                raise Unknown(*value.unknown)
            return value
        text = value.text
        if node.get("Length"):
            return ShellWord(str(len(text)))
        if node.get("Slice"):
            return ShellWord(self._slice(node["Slice"], text))
        if node.get("Repl"):
            return ShellWord(self._replace(node["Repl"], text))
        return value if operator in (None, "?", ":?") else ShellWord(self._cut(operator, word, text))

    def _slice(self, node: Node, text: str) -> str:
        first = self.number(node["Offset"])
        length = self.number(node["Length"]) if node.get("Length") else len(text)
        first = first if first >= 0 else max(0, len(text) + first)
        return text[first:][:length] if length >= 0 else text[first:length]

    def _replace(self, node: Node, text: str) -> str:
        old, new = self.known_text(node["Orig"]), self.known_text(node.get("With"))
        if re.search(r"[*?\[\\]", old) or old[:1] in ("#", "%") or not old:
            raise Unknown(f"the pattern `{old[:40]}`")
        return text.replace(old, new) if node.get("All") else text.replace(old, new, 1)

    def _cut(self, operator: str, word: Node | None, text: str) -> str:
        if operator in ("^^", ",,") and word is None:
            return text.upper() if operator == "^^" else text.lower()
        if operator in ("^", ",") and word is None:
            return (text[:1].upper() if operator == "^" else text[:1].lower()) + text[1:]
        if operator not in ("%", "%%", "#", "##") or word is None or len(text) > _LONGEST_MATCHED:
            raise Unknown(f"the operation {operator} on a variable")
        pattern, size = self.pattern(word), len(text)
        if operator in ("%", "%%"):
            starts = range(size, -1, -1) if operator == "%" else range(size + 1)
            return next((text[:at] for at in starts if pattern.match(text[at:])), text)
        ends = range(size + 1) if operator == "#" else range(size, -1, -1)
        return next((text[at:] for at in ends if pattern.match(text[:at])), text)


def _literal(text: str, in_quotes: bool) -> _Part:
    """Return plain text; in double quotes, a backslash escapes few characters."""
    if not in_quotes and _BRACES.search(text):
        return _Part((ShellWord(text, (f"the braces in `{text[:40]}`, which Bash expands",)),))
    escaped = r"\\(?:\n|([$`\"\\]))" if in_quotes else r"\\(?:\n|(.))"
    return _Part((ShellWord(re.sub(escaped, lambda match: match[1] or "", text, flags=re.S)),))


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), text, flags=re.S)


def _split(word: ShellWord) -> list[ShellWord]:
    """Return the words of an unquoted expansion; all words of a text that is known in part may be others."""
    if word.unknown and ("$(" in word.text or "`" in word.text):
        return [ShellWord(word.text, word.unknown, word.start, word.end, whole=True)]
    alone = bool(word.unknown)
    return [
        ShellWord(part, word.unknown, word.start, word.end, alone and bool(_ALONE.fullmatch(part)))
        for part in word.text.split()
    ]


def _space_out(words: tuple[ShellWord, ...]) -> Iterator[ShellWord]:
    for place, word in enumerate(words):
        if place:
            yield ShellWord(" ")
        yield word


def _join(pieces: list[ShellWord], start: int, end: int, *, whole: bool = False) -> ShellWord:
    reasons = tuple(dict.fromkeys(reason for piece in pieces for reason in piece.unknown))
    return ShellWord("".join(piece.text for piece in pieces), reasons, start, end, whole and bool(reasons))


def count(words: Sequence[ShellWord]) -> str | None:
    """Return the numbers that `seq` prints for integers: LAST, FIRST LAST or FIRST STEP LAST; None for other words."""
    if any(word.unknown or not re.fullmatch(r"-?\d{1,6}", word.text) for word in words):
        return None
    match [int(word.text) for word in words]:
        case [last]:
            first, step = 1, 1
        case [first, last]:
            step = 1
        case [first, step, last] if step:
            pass
        case _:
            return None
    numbers = range(first, last + (1 if step > 0 else -1), step)
    return "\n".join(map(str, numbers)) if len(numbers) <= _MOST_NUMBERS else None
