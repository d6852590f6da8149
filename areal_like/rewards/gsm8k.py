r"""Final answers of responses and references, and whether they are equal.

A reference answer is the answer as a whole, unless it marks its answer (`#### `, `\boxed{}`) or is prose. A response's
answer is the one that it marks, or the expression, taken whole, at its end.
"""

import re

from areal_like.rewards import answers
from areal_like.rewards.notation import plain, words_in

_INTEGER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)")
_MARK = re.compile(r"(?<!#)####(?!#)")
_BOX = re.compile(r"\\f?boxed\s*(?:(\{)|(\d[\d.,]*(?<=\d)|[^\s{}]))|\\fbox\s*(\{)")
_BOLD = re.compile(r"(?<!\w)\*\*(?=\S)([^*]+)\*\*(?!\w)")
_CURRENCY = re.compile(r"\\?\$|[€£¥₹]")
_REMARK = re.compile(r"(?<=\d)[\s:.]*\s\([^\W\d_]{2}(?:[^\W\d_]|[ ,'-])*\)$")  # in words: `7 (seven)`
_SPECIAL = re.compile(r"<\|[^<>|]*\|>|</s>|<eos>|<end_of_turn>")
_PHRASE = re.compile(
    r"\b(?:final |correct )?(?:answer|result)\b(?: to [^.\n:]*| choice)?\s*(?:\*\*)?\s*(?:is|are|equals|:|=)(?!\w)\s*:?|(?:^|\n)\s*A:|\b(?:option|choice)\s+(?=\(?[A-J]\)?[.\s*]*$)|答案(?:是|为)[：:]?",
    re.I,
)
_SPAN = re.compile(
    r"\$\$(?P<a>[^$]+)\$\$|(?<![\\$])\$(?P<b>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)|\\\((?P<c>.+?)\\\)|\\\[(?P<d>.+?)\\\]",
    re.S,
)
_SENTENCE = re.compile(r"(?:(?<!\b[A-Za-z])(?<!Rs)[.!?。](?=\s|$|[*\"'])|\n)")
_REASON = re.compile(r",?\s+(?:because|since|which|so that|where)\b.*", re.S)
_OPERATOR = re.compile(r"\\?[-+*/^_=<>|!,:%·×÷±]|\.(?=\d)")
# one piece of an expression in text: a number, a variable, a command, an operator or a bracket
_PIECE = re.compile(
    r"\d[\d,]*\.?\d*|\.\d+|\\[a-zA-Z]+|\\?\$|[€£¥]|[-+*/^_=<>|!%(){}\[\]π√∞·×÷±−–°]|\\[{}]|,(?=\s*[-\d(\\])|(?<![A-Za-z])[A-Za-z](?![A-Za-z'])"
)
_FULL_SENTENCE = re.compile(
    r"\b(?:is|are|was|were|has|have|had|so|therefore|thus|hence|equals|gets?|answer|makes?|costs?|pays?|earns?|needs?)\b",
    re.I,
)
# The maximum length of a final answer in characters: a constant, plus a factor per character of the reference. The same
# value unreduced, spelled out or with units is a few times as long. A longer answer is a repetition loop of the model,
# and comparing it would run into the time limit.
_LONGEST, _LONGEST_PER_CHARACTER = 100, 4
_SHORT = 4  # words of a text that is an answer as a whole
_MARKS = 50  # marks from the end that may be headings
_END = 2000  # characters at the end of a response without a mark that are read


class _UndecidedError(Exception):
    """Only math-verify can compare the answers."""


def final_answer(text: str) -> str | None:
    r"""Return the final answer of a response: after its last `####`, in its last `\boxed{}`, or at its end.

    Left out are currency signs, bold type, `=` and `:` before it, and `:`, a full stop or a remark in brackets after
    it. None if there is nothing.
    """
    answer = (
        _CURRENCY.sub("", _BOLD.sub(r"\1", _read_response(text).replace("\u2212", "-")))
        .lstrip("=: \t")
        .rstrip(":. \t\n")
    )
    return _REMARK.sub("", answer) or None


def _read_response(text: str) -> str:
    text = _SPECIAL.sub("", text)
    marked = _find_marked(text)
    return (_read_end(text) if marked is None else marked).strip()


def _read_reference(text: str) -> str:
    """Return the answer of a reference: the one it marks, the text as a whole, or the end of prose."""
    marked = _find_marked(text)
    if marked is None:
        marked = _read_end(text) if _is_prose(text) else text
    return marked.strip()


def check(answer: str) -> tuple[str, str] | None:
    """Return the fault of a reference answer and a fix, or None if a response can equal it."""
    wanted = _read_reference(answer)
    if not plain(wanted):
        return "no final answer", "end it with `#### ` and the answer"
    if not answers.is_readable(wanted):
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
    given, wanted = _read_response(response), _read_reference(answer)
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(wanted):
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


def _find_marked(text: str) -> str | None:
    r"""Return the text after the last `####` or in the last `\boxed{}`, None if there is neither.

    `####` before a title is a heading of Markdown.
    """
    marks = [(match.start(), match.end(), None) for match in _MARK.finditer(text)]
    boxes = [(match.start(), match.end(), match) for match in _BOX.finditer(text)]
    found = sorted([*marks, *boxes], key=lambda each: each[0], reverse=True)[:_MARKS]
    for index, (start, end, box) in enumerate(found):
        if box is not None:
            return _cut_at_brace(text[end:]) if box[1] or box[3] else box[2]
        line, _, rest = text[end:].strip().partition("\n")
        if text[:start].endswith("**"):  # the mark is in bold, too
            line = line.replace("**", "", 1)
        if not _is_heading(line, rest, earlier=len(found) > index + 1):
            return line
    return None


def _is_heading(line: str, rest: str, *, earlier: bool) -> bool:
    """Return whether the line after `####` is a heading: a title without a number, with an answer elsewhere."""
    if (
        re.match(r"(?:step|part|case|question|problem|example|method|solution)\s*\d*\s*[:.]?", line, re.I)
        and rest.strip()
    ):
        return True
    if re.match(r"\d+[.)]\s+[A-Z][a-z]", line) and rest.strip():
        return True
    if re.search(r"\d|\\", line):
        return False
    return bool(rest.strip()) and (earlier or bool(re.search(r"\d", rest))) and len(line) > 1


def _read_end(text: str) -> str:
    """Return the answer of a text without a mark: after `the answer is`, or the expression at its end."""
    text = re.sub(r"^\s*#+\s", "", text[-_END:], flags=re.M).rstrip()
    if phrases := list(_PHRASE.finditer(text)):
        said = _read_phrase(text[phrases[-1].end() :].lstrip())
        if said:
            return said
    numbers = list(re.finditer(r"\d", text))
    spans = list(_SPAN.finditer(text))
    if spans and (not numbers or spans[-1].end() > numbers[-1].start()):
        return next(group for group in spans[-1].groups() if group is not None)
    if len(text.split()) <= _SHORT and "=" not in text and re.match(r"[-+\d\\(\[{$€£.]", text):
        return text
    if not numbers:
        return text if len(words_in(text)) <= 12 else ""
    return _read_expression(text, numbers[-1].start())


def _read_phrase(text: str) -> str:
    span = _SPAN.match(text.lstrip("*: "))
    if span:
        return next(group for group in span.groups() if group is not None)
    sentence = _SENTENCE.split(text, maxsplit=1)[0] if text else ""
    return _REASON.sub("", sentence).strip()


def _read_expression(text: str, at: int) -> str:
    """Return the whole expression in a text that contains a position, with a word of magnitude behind it."""
    runs: list[tuple[int, int]] = []
    for piece in _PIECE.finditer(text):
        gap = text[runs[-1][1] : piece.start()].strip() if runs else ""
        if runs and (not gap or (gap in ("or", "and") and "=" in text[slice(*runs[-1])])):
            runs[-1] = runs[-1][0], piece.end()
        else:
            runs.append(piece.span())
    start, end = next(run for run in reversed(runs) if run[0] <= at < run[1])
    found = re.sub(
        r"^(?:[aAI]\s+|[,)\]}*/^=!%|]+\s*|[-+]\s+(?=[a-zA-Z]\b))+|(?:\s+[aAI])+$", "", text[start:end]
    ).strip(" ,*_")
    while found[-1:] in tuple("([{=-+") and found:
        found = found[:-1].rstrip()
    if found.count("(") < found.count(")"):
        found = found.rstrip(")")
    behind = re.match(r"\s*([a-zA-Z]+)", text[end:])
    if behind and behind[1].lower() in _MAGNITUDES:
        found = f"{found} {behind[1]}"
    return found.rpartition("=")[2].strip() if re.fullmatch(r"[^a-zA-Z\\]*", found) else found


_MAGNITUDES = ["hundred", "thousand", "million", "billion", "trillion", "dozen", "thousandths", "hundredths", "tenths"]


def _is_prose(text: str) -> bool:
    """Return whether a reference is sentences about its answer: several lines of words, or a sentence with a verb."""
    if not re.search(r"\d|\\|\$", text) or r"\begin" in text:
        return False
    bare = re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}", " ", text)
    words = words_in(bare)
    return (len(words) >= 2 and _FULL_SENTENCE.search(bare) is not None) or (len(words) >= 2 and "\n" in bare.strip())


def _cut_at_brace(text: str) -> str:
    depth = 1
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:index]
    return text
