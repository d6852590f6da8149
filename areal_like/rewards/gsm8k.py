r"""Final answers of responses and references, and whether they are equal.

A reference answer is the answer as a whole, unless it marks its answer (`#### `, `\boxed{}`) or is prose. A response's
answer is the one that it marks, or the expression, taken whole, at its end.
"""

import re

from areal_like.rewards import answers
from areal_like.rewards.amounts import NUMBER_WORDS
from areal_like.rewards.notation import plain, words_in

_INTEGER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)")
_MARK = re.compile(r"(?<!#)####(?!#)")
_BOX = re.compile(r"\\f?boxed\s*(?:(\{)|(\d[\d.,]*(?<=\d)|[^\s{}]))|\\fbox\s*(\{)")
_BOLD = re.compile(r"(?<!\w)\*\*(?=\S)([^*]+)\*\*(?!\w)")
_CURRENCY = re.compile(r"\\?\$|[€£¥₹]")
_REMARK = re.compile(r"(?<=\d)[\s:.]*\s\([^\W\d_]{2}(?:[^\W\d_]|[ ,'-])*\)$")  # in words: `7 (seven)`
_SPECIAL = re.compile(r"<<[^<>\n]*>>|<\|[^<>|]*\|>|</s>|<eos>|<end_of_turn>")
_THOUGHTS = re.compile(r"<(think|thinking|thought|reasoning)>.*?(?:</\1>|\Z)|\A.*</think>", re.S)
_TAGGED = re.compile(r"[<\[]answer[>\]](.*?)(?:[<\[]/answer[>\]]|\Z)", re.S | re.I)
_NEXT_QUESTION = re.compile(r"\n\s*[*#]*\s*(?:Q|Question|Problem|Human|User)\s*\d*\s*\**:")  # made up by a base model
_PHRASE = re.compile(
    r"\b(?:answer|result|option|choice|solution)s?\b(?: to [^.\n:]*| choice)?\s*(?:\*\*)?\s*(?:is|are|equals|:|=)(?!\w)\s*:?"
    r"(?!\s*(?:correct|right|wrong|found|given|obtained|determined|calculated|as follows|that)\b)"
    r"|(?:^|\n)\s*A:|答案(?:是|为)?[：:]?|\b(?:choose|pick|select|be|option|choice)\s+(?=\W*[A-J]\W*$)"
    r"|(?=\(?\b[A-J]\)?\W+is (?:the )?(?:correct|right)\b)",
    re.I,
)
_SPAN = re.compile(
    r"\$\$(?P<a>[^$]+)\$\$|(?<![\\$])\$(?P<b>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)|\\\((?P<c>.+?)\\\)|\\\[(?P<d>.+?)\\\]",
    re.S,
)
_SENTENCE = re.compile(r"(?:(?<!\b[A-Za-z])(?<!Rs)[.!?。](?=\s|$|[*\"'])|\n)")
_REASON = re.compile(r",?\s+(?:because|since|which|so that|where|is (?:the )?(?:correct|right))\b.*", re.S)
_CIRCUMSTANCE = re.compile(
    r"(?<=\d)([^\d.!?\n]*?)\s(?:by|after|because|since|if|when|than|during|for(?! \\?\$)|in|with|to(?= [a-z]))\s[^,=\n]*$"
)  # `18 by selling 9 eggs`
_CONTRAST = re.compile(r",?\s+(?:\(?not|rather than|instead of)\s+[$\d][^,.;\n]*")  # `18, not 17`
_OFFER = re.compile(
    r"(?:(?<=[.!?\n*])|\A)[\s*]*(?:would|do|shall|can|could|let me|hope|i hope|feel free|is there)\b[^.!?\n]*[.!?]?\s*\Z",
    re.I,
)
# before or behind an expression that is not stated as the answer
_HEDGE = re.compile(
    r"(?:\bbetween [\s$\\\d.,]+ and|\b(?:not|never|maybe|perhaps|possibly|either|between|(?:could|might|may) (?:\w+ )?be)|n't)\s+(?:be |equal (?:to )?)?[\s$*(]*$",
    re.I,
)
_DENIAL = re.compile(
    r"[\s$*)]*(?:is|was) (?:not (?:the|correct|right|possible|enough)|wrong|incorrect|impossible)\b", re.I
)
_REFUSAL = re.compile(
    r"\b(?:(?:do not|don't|cannot|can't|unable to|not able to) (?:know|answer|solve|determine)|not sure|not enough information)\b",
    re.I,
)
_UNFINISHED = re.compile(r"(?:[-+*/=^×÷(]|\\\w+|\b(?:is|are|equals|the|of|and|or))\s*$")
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
    """Return the answer that a response states, after its thoughts and before another question."""
    text = _THOUGHTS.sub("", _SPECIAL.sub("", text))
    for question in _NEXT_QUESTION.finditer(text):
        before = text[: question.start()]
        if _PHRASE.search(before) or _find_marked(before) is not None:
            text = before
            break
    if tagged := _TAGGED.findall(text):
        text = tagged[-1]
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

    Several that follow each other without a word are one list. `####` before a title is a heading of Markdown, and a
    box that was cut off is empty.
    """
    found = sorted([*_MARK.finditer(text), *_BOX.finditer(text)], key=re.Match.start, reverse=True)[:_MARKS]
    answers_found: list[str] = []
    kind, begin = _MARK, 0
    for index, match in enumerate(found):
        is_mark = match.re is _MARK
        content, end = _read_line(text, match) if is_mark else _read_box(text, match)
        if answers_found and (match.re is not kind or end > begin or not _JOINT.fullmatch(text[end:begin])):
            break
        if is_mark and _is_heading(content, text[end:], earlier=len(found) > index + 1):
            continue
        if content not in answers_found:
            answers_found.insert(0, content)
        kind, begin = match.re, match.start()
    return "; ".join(answers_found) if answers_found else None


_JOINT = re.compile(r"(?:[\s$,;&]|\\[()\[\]]|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*")


def _read_line(text: str, mark: re.Match[str]) -> tuple[str, int]:
    start = mark.end() + len(text[mark.end() :]) - len(text[mark.end() :].lstrip())
    line = text[start:].partition("\n")[0]
    end = start + len(line)
    if text[: mark.start()].endswith("**"):  # the mark is in bold, too
        line = line.replace("**", "", 1)
    return line.strip(), end


def _read_box(text: str, box: re.Match[str]) -> tuple[str, int]:
    if not (box[1] or box[3]):
        return box[2], box.end()
    depth = 1
    for index, character in enumerate(text[box.end() :], box.end()):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[box.end() : index], index + 1
    rest = text[box.end() :].rstrip()
    return (rest if rest.endswith(("}", ")", ".", "$")) else ""), len(text)  # else it was cut off


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
    """Return the answer of a text without a mark: after `the answer is`, or the expression that it ends with."""
    text = re.sub(r"^\s*#+\s", "", text[-_END:], flags=re.M).rstrip()
    if phrases := list(_PHRASE.finditer(text)):
        return _read_phrase(text[phrases[-1].end() :])
    if truth := re.match(r"(yes|no|true|false),?\s+(?:because|since|as)\b", text, re.I):
        return truth[1]
    text = _OFFER.sub("", text).rstrip("*. ")
    if text.endswith("?") or _UNFINISHED.search(text) or _REFUSAL.search(text):
        return ""
    text = _CONTRAST.sub("", _CIRCUMSTANCE.sub(r"\1", text)).rstrip()
    numbers = list(re.finditer(r"\d", text))
    spans = list(_SPAN.finditer(text))
    if spans and (not numbers or spans[-1].end() > numbers[-1].start()):
        return "" if _is_hedged(text, *spans[-1].span()) else spans[-1][spans[-1].lastgroup or 0]
    if len(text.split()) <= _SHORT and "=" not in text and re.match(r"[-+\d\\(\[{$€£.]|[A-J][.:)]\s", text):
        return text
    if not numbers:
        spelled = list(_SPELLED.finditer(text))
        return text[spelled[-1].start() :] if spelled else text if len(words_in(text)) <= 12 else ""
    return _read_expression(text, numbers[-1].start())


def _is_hedged(text: str, start: int, end: int) -> bool:
    """Return whether the words around an expression do not state it as the answer."""
    stop = _SENTENCE.search(text, end)
    return bool(_HEDGE.search(text[:start]) or _DENIAL.match(text, end) or (stop and stop[0] == "?"))


def _read_phrase(text: str) -> str:
    text = text.lstrip("*_: \n\t")
    spans, at = [], 0
    while span := _SPAN.match(text, at):
        spans.append(span[span.lastgroup or 0])
        joint = re.compile(r",?\s*(?:and|or)?\s*").match(text, span.end())
        at = joint.end() if joint else span.end()
    if spans:
        return "; ".join(spans)
    return _CONTRAST.sub("", _REASON.sub("", _SENTENCE.split(text, maxsplit=1)[0])).strip()


def _read_expression(text: str, at: int) -> str:
    """Return the whole expression in a text that contains a position, with a word of magnitude behind it."""
    runs: list[tuple[int, int]] = []
    for piece in _PIECE.finditer(text):
        gap = text[runs[-1][1] : piece.start()].strip() if runs else ""
        if runs and (not gap or gap == "or" or (gap == "and" and "=" in text[slice(*runs[-1])])):
            runs[-1] = runs[-1][0], piece.end()
        else:
            runs.append(piece.span())
    sentence = max((match.end() for match in _SENTENCE.finditer(text, 0, at)), default=0)
    results = [run for run in runs if run[0] >= sentence and re.search(r"=\s*[^\s=]*\d", text[slice(*run)])]
    if results and re.search(r"\b(?:rounds?|rounded|which is|meaning)\b", text[results[-1][1] :]):
        results = []
    start, end = results[-1] if results else next(run for run in reversed(runs) if run[0] <= at < run[1])
    if _is_hedged(text, start, end):
        return ""
    found = re.sub(
        r"^(?:[aAI]\s+|=>\s*|[,)\]}*/^=!%|]+\s*|[-+]\s+(?=[a-zA-Z]\b))+|(?:\s+[aAI])+$", "", text[start:end]
    ).strip(" ,*_")
    while found[-1:] in tuple("([{=-+") and found:
        found = found[:-1].rstrip()
    if found.count("(") < found.count(")"):
        found = found.rstrip(")")
    behind = re.match(r"\s*([a-zA-Z]+)", text[end:])
    if behind and behind[1].lower() in _MAGNITUDES:
        found = f"{found} {behind[1]}"
    return found.rpartition("=")[2].strip() if re.fullmatch(r"[^a-zA-Z\\]*", found) else found


_SPELLED = re.compile(rf"\b(?:(?:{'|'.join(NUMBER_WORDS)})\b[\s-]*(?:and\s)?)+(?<!\bone )", re.I)
_MAGNITUDES = ["hundred", "thousand", "million", "billion", "trillion", "dozen", "thousandths", "hundredths", "tenths"]


def _is_prose(text: str) -> bool:
    """Return whether a reference is sentences about its answer: several lines of words, or a sentence with a verb."""
    if not re.search(r"\d|\\|\$", text) or r"\begin" in text:
        return False
    bare = re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}", " ", text)
    words = words_in(bare)
    return (len(words) >= 2 and _FULL_SENTENCE.search(bare) is not None) or (len(words) >= 2 and "\n" in bare.strip())
