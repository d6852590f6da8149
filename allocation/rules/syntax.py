"""Rules about the text, and about members that do not fit the grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allocation.diagnostics import Problem
from allocation.language.reading import Failure
from allocation.language.syntax import LONGEST
from allocation.resolve import BACKENDS
from allocation.rules.registry import rule

_LANGUAGE = "the allocation language"
_DIMS = re.compile(r"\s*((?:[dptcev](?:\*|[0-9]+)\s*)+)$")
_DOT = re.compile(r"\s*([A-Za-z_]\w*)\s*\.\s*((?:[a-z][0-9]+)+)")
_TERMINALS = {
    "NAME": "a backend or a name",
    "DIM": "dimensions such as `d4t2`",
    "INT": "a GPU id",
    "ATTN": "`attn:`",
    "FFN": "`ffn:`",
    "COLON": "`:`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "PLUS": "`+`",
    "VBAR": "`|`",
    "SLASH": "`/`",
    "AT": "`@`",
    "COMMA": "`,`",
    "MINUS": "`-`",
}


@rule("ALLOC-EMPTY", source=_LANGUAGE)
def empty(text: str) -> Iterator[Problem]:
    """An allocation names at least one engine."""
    if not text.strip():
        yield Problem("the allocation is empty", help="write for example `sglang:d4+megatron:d4`")


@rule("ALLOC-TOO-LONG", source=_LANGUAGE)
def too_long(text: str) -> Iterator[Problem]:
    """A bound on the text keeps every answer fast; a real allocation is far below it."""
    if len(text) > LONGEST:
        yield Problem(
            f"the allocation has {len(text):,} characters; at most {LONGEST:,} are read",
            help="GPU ids can be written as ranges: `@0-7,16-23`",
        )


@rule("ALLOC-DOT-FORM", source="AReaL 1.0 dropped `backend.layout` for `backend:layout`")
def dot_form(failure: Failure) -> Iterator[Problem]:
    """The older spelling with a dot is refused rather than guessed at: it could not name engines."""
    if match := _DOT.match(failure.member):
        yield Problem("the dot form was dropped", failure.whole, f"write `{match[1]}:{match[2]}`")


@rule("ALLOC-BACKEND-MISSING", source=_LANGUAGE)
def backend_missing(failure: Failure) -> Iterator[Problem]:
    """Dimensions alone do not say which engine runs them."""
    if match := _DIMS.match(failure.member):
        dims = match[1].strip()
        having = [b.name for b in BACKENDS.values() if b.name in ("megatron", "sglang") and _has(b.letters, dims)]
        help = "name the backend: " + ", ".join(f"`{name}:{dims}`" for name in having or ["megatron"])
        yield Problem(f"`{dims}` has no backend", failure.whole, help)


@rule("ALLOC-PARENTHESIS", source=_LANGUAGE)
def parenthesis(failure: Failure) -> Iterator[Problem]:
    """A folded layout stands in parentheses, or in the shell-safe spelling has `/` and no parentheses."""
    if "RPAR" in failure.expected:
        yield Problem("the `)` that closes the folded layout is missing", failure.here)
    elif "SLASH" in failure.expected:
        yield Problem(
            "a folded layout without parentheses needs `/ffn:` here",
            failure.here,
            "write `(attn:…|ffn:…)`, or `attn:…/ffn:…` without quotes in a shell",
        )
    elif re.match(r"\s*ffn\s*:", failure.text[failure.start :]) or re.match(r"\s*\(\s*ffn\b", _layout(failure)):
        yield Problem("`ffn` comes second in a folded layout", failure.whole, "write `(attn:…|ffn:…)`")


def _has(letters: str, dims: str) -> bool:
    return all(letter in letters for letter in re.findall("[a-z]", dims))


def _layout(failure: Failure) -> str:
    return failure.member.partition(":")[2]


@rule("ALLOC-SYNTAX", source=_LANGUAGE)
def unexpected(unexplained: Failure) -> Iterator[Problem]:
    """The text does not fit the grammar at this place; what would fit is named."""
    expected = [words for name, words in _TERMINALS.items() if name in unexplained.expected]
    if not unexplained.member.strip():
        yield Problem("an engine is missing here", unexplained.here, "write for example `megatron:d4`")
        return
    wanted = " or ".join(expected) or "nothing more"
    help = "a count is a positive integer, right after its letter: `d4`" if "DIM" in unexplained.expected else None
    if unexplained.position >= unexplained.end:
        yield Problem(f"the text ends where {wanted} should follow", unexplained.here)
    else:
        yield Problem(
            f"`{unexplained.text[unexplained.position]}` does not fit here; {wanted} would", unexplained.here, help
        )
