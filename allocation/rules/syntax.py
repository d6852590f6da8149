"""Rules about the text, and about members that do not fit the grammar."""

import re
from collections.abc import Iterator

from allocation.backends import BACKENDS
from allocation.diagnostics import Problem
from allocation.language.reading import GrammarFailure
from allocation.language.syntax import LONGEST
from allocation.registry import LANGUAGE, rule

_DIMS = re.compile(r"\s*((?:[dptcev](?:\*|[0-9]+)\s*)+)$")
_DOT = re.compile(r"\s*([A-Za-z_]\w*)\s*\.\s*((?:[a-z][0-9]+)+)")
_TERMINALS = {
    "NAME": "a backend or a name",
    "DIMS": "dimensions such as `d4t2`",
    "INT": "a GPU id",
    "ATTN": "`attn:`", "FFN": "`ffn:`", "COLON": "`:`",
    "LPAR": "`(`", "RPAR": "`)`", "LSQB": "`[`", "RSQB": "`]`",
    "PLUS": "`+`", "VBAR": "`|`", "SLASH": "`/`", "AT": "`@`", "COMMA": "`,`", "MINUS": "`-`",
}  # fmt: skip


@rule("ALLOC-EMPTY", source=LANGUAGE)
def empty(text: str) -> Iterator[Problem]:
    """An allocation names at least one engine."""
    if not text.strip():
        example = "sglang:d4+megatron:d4"
        yield Problem("the allocation is empty", help=f"write for example `{example}`", quoted=(example,))


@rule("ALLOC-TOO-LONG", source=LANGUAGE)
def too_long(text: str) -> Iterator[Problem]:
    """A length limit keeps every answer fast; real allocations are far shorter."""
    if len(text) > LONGEST:
        message = f"the allocation has {len(text):,} characters; at most {LONGEST:,} are read"
        yield Problem(message, help="GPU ids can be written as ranges: `@0-7,16-23`")


@rule("ALLOC-DOT-FORM", source="AReaL 1.0 dropped `backend.layout` for `backend:layout`")
def dot_form(failure: GrammarFailure) -> Iterator[Problem]:
    """The older spelling with a dot is rejected, not guessed: it could not name engines."""
    if match := _DOT.match(failure.member):
        today = f"{match[1]}:{match[2]}"
        message = "the spelling with a dot is no longer supported"
        yield Problem(message, failure.whole, f"write `{today}`", quoted=(today,))


@rule("ALLOC-BACKEND-MISSING", source=LANGUAGE)
def backend_missing(failure: GrammarFailure) -> Iterator[Problem]:
    """Dimensions alone do not determine the engine."""
    if match := _DIMS.match(failure.member):
        dims = match[1].strip()
        letters = set(re.findall("[a-z]", dims))
        having = [name for name in ("megatron", "sglang") if letters <= set(BACKENDS[name].letters)]
        named = tuple(f"{name}:{dims}" for name in having or ["megatron"])
        help = f"name the backend: {', '.join(map('`{}`'.format, named))}"
        yield Problem(f"`{dims}` has no backend", failure.whole, help, quoted=named)


@rule("ALLOC-PARENTHESIS", source=LANGUAGE)
def parenthesis(failure: GrammarFailure) -> Iterator[Problem]:
    """A folded layout is written in parentheses, or in the shell-safe spelling with `/` and without parentheses."""
    if "RPAR" in failure.expected:
        yield Problem("the closing `)` of the folded layout is missing", failure.here)
    elif "SLASH" in failure.expected:
        help = "write `(attn:…|ffn:…)`, or `attn:…/ffn:…` without quotes in a shell"
        yield Problem("a folded layout without parentheses needs `/ffn:` here", failure.here, help)
    elif re.match(r"\s*ffn\s*:|[^:]*:\s*\(\s*ffn\b", failure.member):
        yield Problem("`ffn` must come second in a folded layout", failure.whole, "write `(attn:…|ffn:…)`")


@rule("ALLOC-SYNTAX", source=LANGUAGE)
def syntax_error(unexplained: GrammarFailure) -> Iterator[Problem]:
    """The text violates the grammar at this position; the finding names the valid continuations."""
    expected = [words for name, words in _TERMINALS.items() if name in unexplained.expected]
    if not unexplained.member.strip():
        example = "megatron:d4"
        yield Problem(
            "an engine is missing here", unexplained.here, f"write for example `{example}`", quoted=(example,)
        )
        return
    wanted = " or ".join(expected) or "nothing more"
    help = "a count is a positive integer, right after its letter: `d4`" if "DIMS" in unexplained.expected else None
    if unexplained.position >= unexplained.end:
        yield Problem(f"the text ends where {wanted} should follow", unexplained.here)
    else:
        message = f"`{unexplained.text[unexplained.position]}` does not fit here; {wanted} would"
        yield Problem(message, unexplained.here, help)
