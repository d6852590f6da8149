"""Comparison of final answers by GSM8K's rule, with math-verify for answers that are not plain integers.

GSM8K's grader (grade_school_math/dataset.py) takes the number right after `####`, whatever follows it. This module does
the same if the reference is a plain number and words follow: `18 eggs` is 18, but neither `7/2` nor `7 million` is 7.
"""

import re

_INTEGER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)")
_PLAIN = re.compile(rf"{_INTEGER.pattern}(?:\.\d+)?|-?\.\d+")
_FACTOR = r"\b(?:hundred|thousand|million|billion|trillion|dozen|half|pi)\b"  # words that make it another number
_AMOUNT = re.compile(
    rf"(?P<number>(?>{_PLAIN.pattern}))[.,]?(?!.*{_FACTOR})(?:\s*[^\W\d_]{{2}}\D*?)?(?:\.\s.*)?",
    re.DOTALL | re.IGNORECASE,
)
_CURRENCY = re.compile(r"\\?\$|[€£¥]")
# a minus after a word or a bracket is a range or a difference
_SIGN = rf"(?:(?<![\w)])-(?:{_CURRENCY.pattern})?)?"
_NUMBER = re.compile(_SIGN + r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|\.\d+)")
_BOLD = re.compile(r"(?<!\w)\*\*(?=\S)([^*]+)\*\*(?!\w)")
_REMARK = re.compile(r"(?<=\d)[\s:.]*\s\([^\W\d_]{2}(?:[^\W\d_]|[ ,'-])*\)$")  # in words: `7 (seven)`
_MARK = "####"
_BOX = r"\boxed{"
# The maximum length of a final answer in characters: a constant, plus a factor per character of the reference. The same
# value unreduced, spelled out or with units is a few times as long. A longer answer is a repetition loop of the model,
# and comparing it would run into the time limit.
_LONGEST, _LONGEST_PER_CHARACTER = 100, 4


def final_answer(text: str) -> str | None:
    r"""Return the final answer of a text: after its last `####`, in its last `\boxed{}`, or its last number.

    Left out are currency signs, bold type, `=` and `:` before it, and `:`, a full stop or a remark in brackets after
    it. None if there is nothing.
    """
    text = _BOLD.sub(r"\1", text.replace("\u2212", "-"))  # Unicode's own minus
    mark, box = text.rfind(_MARK), text.rfind(_BOX)
    if mark >= 0 and mark > box:
        answer = text[mark + len(_MARK) :].strip().split("\n")[0]
    elif box >= 0:
        answer = _until_closing_brace(text[box + len(_BOX) :])
    else:
        numbers = _NUMBER.findall(text)
        answer = numbers[-1] if numbers else ""
    answer = _CURRENCY.sub("", answer).lstrip("=: \t").rstrip(":. \t\n")
    return _REMARK.sub("", answer) or None


def check(answer: str) -> tuple[str, str] | None:
    """Return the fault of a reference answer and a fix, or None if a response can equal it."""
    if final_answer(answer) is None:
        return "no final answer", "end it with `#### ` and the answer"
    return None


def quick(response: str, answer: str) -> float | None:
    """Return the reward if plain integers decide it, None if `verify` has to run.

    The reward is 1.0 or 0.0, as from `verify`: 0 without a final answer; two integers are compared as integers.
    """
    given, wanted = _final_answers(response, answer)
    if given is None:
        return 0.0
    if wanted is not None and _INTEGER.fullmatch(given) and _INTEGER.fullmatch(wanted):
        return float(_digits(given) == _digits(wanted))
    return None


def verify(response: str, answer: str) -> float:
    """Return 1.0 if the final answers are mathematically equal, else 0.0. May hang: call it in a process of its own."""
    from areal_like.rewards.symbolic import equal  # takes seconds

    given, wanted = _final_answers(response, answer)
    return float(given is not None and wanted is not None and equal(given, wanted))


def _final_answers(response: str, answer: str) -> tuple[str | None, str | None]:
    """Return the final answers of both; against a plain number, words after a response's number are ignored.

    An answer that is far longer than the reference counts as missing.
    """
    given, wanted = final_answer(response), final_answer(answer)
    if given and wanted and _PLAIN.fullmatch(wanted) and (amount := _AMOUNT.fullmatch(given)):
        given = amount["number"]
    if given and wanted and len(given) > _LONGEST + _LONGEST_PER_CHARACTER * len(wanted):
        given = None
    return given, wanted


def _digits(integer: str) -> tuple[bool, str]:
    """Return sign and digits of an integer, of any length (`int` refuses more than 4,300 digits)."""
    digits = integer.replace(",", "").removeprefix("-").lstrip("0")
    return integer.startswith("-") and digits != "", digits


def _until_closing_brace(text: str) -> str:
    depth = 1
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:index]
    return text
