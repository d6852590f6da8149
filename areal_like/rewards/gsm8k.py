r"""Final answers of responses and references, and whether they are equal.

A reference answer is the answer as a whole, unless it marks its answer (`#### `, `\boxed{}`) or is prose. A response's
answer is the one that it marks, or the expression, taken whole, at its end.
"""

import re

from areal_like.rewards import answers
from areal_like.rewards.notation import plain
from areal_like.rewards.reading import read_reference, read_response

_INTEGER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)")
_BOLD = re.compile(r"(?<!\w)\*\*(?=\S)([^*]+)\*\*(?!\w)")
_CURRENCY = re.compile(r"\\?\$|[€£¥₹]")
_REMARK = re.compile(r"(?<=\d)[\s:.]*\s\([^\W\d_]{2}(?:[^\W\d_]|[ ,'-])*\)$")  # in words: `7 (seven)`
# The maximum length of a final answer in characters: a constant, plus a factor per character of the reference. The same
# value unreduced, spelled out or with units is a few times as long. A longer answer is a repetition loop of the model,
# and comparing it would run into the time limit.
_LONGEST, _LONGEST_PER_CHARACTER = 100, 4


class _UndecidedError(Exception):
    """Only math-verify can compare the answers."""


def final_answer(text: str) -> str | None:
    r"""Return the final answer of a response: after its last `####`, in its last `\boxed{}`, or at its end.

    Left out are currency signs, bold type, `=` and `:` before it, and `:`, a full stop or a remark in brackets after
    it. None if there is nothing.
    """
    answer = (
        _CURRENCY.sub("", _BOLD.sub(r"\1", read_response(text).replace("\u2212", "-")))
        .lstrip("=: \t")
        .rstrip(":. \t\n")
    )
    return _REMARK.sub("", answer) or None


def check(answer: str) -> tuple[str, str] | None:
    """Return the fault of a reference answer and a fix, or None if a response can equal it."""
    wanted = read_reference(answer)
    if len(wanted) == 1 and _INTEGER.fullmatch(wanted[0]):  # most of them, at a hundredth of the time
        return None
    if len(wanted) > 1:
        return "a sentence with several numbers as an answer", "end it with `#### ` and the answer"
    if not wanted or not plain(wanted[0]):
        return "no final answer", "end it with `#### ` and the answer"
    if not answers.is_readable(wanted[0]):
        return "an answer that cannot be read as a whole", "complete it, or end it with `#### ` and the answer"
    return None


def quick(response: str, answer: str) -> float | None:
    """Return the reward if it needs no mathematics, None if `verify` has to run.

    The reward is 1.0 or 0.0, as from `verify`: 0 without a final answer; numbers, choices and words are compared here.
    """
    try:
        return float(_equal(response, answer, _give_up))
    except _UndecidedError:
        return None


def verify(response: str, answer: str) -> float:
    """Return 1.0 if the final answers are mathematically equal, else 0.0. May hang: call it in a process of its own."""

    def symbolic(given: str, wanted: str) -> bool:
        from areal_like.rewards.symbolic import equal  # takes seconds

        return equal(given, wanted)

    return float(_equal(response, answer, symbolic))


def _give_up(given: str, wanted: str) -> bool:
    raise _UndecidedError


def _equal(response: str, answer: str, symbolic: answers.Symbolic) -> bool:
    given, wanted = read_response(response), (read_reference(answer) or [""])[-1]
    if given.isascii() and _INTEGER.fullmatch(given) and _INTEGER.fullmatch(wanted):
        return _digits(given) == _digits(wanted)
    if sentence := re.match(r"[^\n]{1,200}?[^\W\d_]{2}\.(?=\s)", given):  # words that go on after the answer
        given = sentence[0]
    if len(given) > _LONGEST + _LONGEST_PER_CHARACTER * len(wanted):
        return False
    return answers.equal(given, wanted, symbolic)


def _digits(integer: str) -> tuple[bool, str]:
    """Return sign and digits of an integer, of any length (`int` refuses more than 4,300 digits)."""
    digits = integer.replace(",", "").removeprefix("-").lstrip("0")
    return integer.startswith("-") and digits != "", digits
