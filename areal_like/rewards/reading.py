r"""The final answer in a text: of a response, or of a reference with sentences."""

import re
from itertools import islice

from areal_like.rewards.amounts import NUMBER_WORDS, SCALES
from areal_like.rewards.notation import MONTH, words_in

_MARK = re.compile(r"(?<!#)####(?!#)")
_BOX = re.compile(r"\\f?boxed\s*(?:(\{)|(\d[\d.,]*(?<=\d)|[^\s{}]))|\\fbox\s*(\{)")
_JOINT = re.compile(  # between marked answers
    r"(?:[\s$,;&]|\\[()\[\]]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|[a-zA-Z](?:_\{?\w+\}?)?\s*=)*"
)
_SPECIAL = re.compile(r"<<[^<>\n]*>>|<\|[^<>|]*\|>|</s>|<eos>|<end_of_turn>")
_THOUGHTS = re.compile(r"<(think|thinking|thought|reasoning)>.*?(?:</\1>|\Z)|\A.*</think>", re.S)
_TAGGED = re.compile(r"[<\[]answer[>\]](.*?)(?:[<\[]/answer[>\]]|\Z)", re.S | re.I)
_NEXT_QUESTION = re.compile(r"\n\s*[*#]*\s*(?:Q|Question|Problem|Human|User)\s*\d*\s*\**:")  # made up by a base model
_PHRASE = re.compile(
    r"\b(?:answer|result|option|choice|solution)s?\b(?: to [^.\n:]*| choice)?\s*(?:\*\*)?\s*(?:(?:is|are|equals)\b|[:=]|[-–]\s)\s*:?"
    r"(?!\s*(?:correct|right|wrong|found|given|obtained|determined|calculated|as follows|that)\b)"
    r"|(?:^|\n)\s*A:|答案(?:是|为)?[：:]?|\b(?:choose|pick|select|be|option|choice|it(?:'s| is))\s+(?=\W*[A-J]\b\W*(?:$|because\b|since\b))"
    r"|(?=\(?\b[A-J]\)?\W+is (?:the )?(?:correct|right)\b)",
    re.I,
)
_FINAL = re.compile(r"\bfinal answer (?:is|=)\s*:?\s*(?=[$\\\d(-])", re.I)
_SPAN = re.compile(
    r"\$\$(?P<a>[^$]+)\$\$|(?<![\\$])\$(?P<b>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)|\\\((?P<c>.+?)\\\)|\\\[(?P<d>.+?)\\\]"
    r"|(?<![\\$])\$\s(?P<e>[^$\n]*\\[a-z][^$\n]*)\s\$",
    re.S,
)
_ANSWER = re.compile(r"answer|答案|A:", re.I)
_OPENING = re.compile(r"(?!(?:yes|no|true|false)\b)[a-z]{2}", re.I)  # of a sentence
_NEXT_SPAN = re.compile(r",?\s*(?:and|or)?\s*")
_SENTENCE = re.compile(r"(?:(?<!\b[A-Za-z])(?<!Rs)[.!?。](?=\s|$|[*\"'])|\n)")
_REASON = re.compile(r",?\s+(?:because|since|which|so that|where|is (?:the )?(?:correct|right))\b.*", re.S)
_CIRCUMSTANCE = re.compile(  # `18 by selling 9 eggs`
    r"(?<=\d)([^\d.!?\n]*?)\s(?:by|after|because|since|if|when|than|during|for(?! \\?\$| an? (?:\w+ )?(?:total|sum|average|profit|loss)\b)|in|with|to(?= [a-z])|(?:of|on|from|among)(?= (?:the|these|those|all|his|her|their) \d))\s(?![^\n]*\b(?:is|are|was|were|equals)\b)[^,=\n]*$"
)
_ASIDE = re.compile(  # `17 more than John, who has 3`
    r",\s+(?:who|whose|attained|achieved|reached|when|where|or (?:about|approximately|roughly|around)|which is (?:less|more|greater|smaller|about))\b[^\n]*$"
)
_UNIT_BEHIND = re.compile(r"\s*([a-zA-Z]{2,}|[mgLJNVW])\b(?!\s*[=a-zA-Z])")
_ADVERB = re.compile(r"(?:therefore|thus|then|hence|simply|clearly|just|also)\s+", re.I)
_RATIO = re.compile(r"\bratio\b.*?(?<![\d.])(\d+(?:\.\d+)?(?:\s*(?::|\bto\b)\s*\d+(?:\.\d+)?)+)\.?$")
_CONTRAST = re.compile(
    r"(?:(?:,\s*|\s\()not|,?\s+(?:rather than|instead of))\s+(?:[$\d]|\(?[A-J]\b)[^,.;\n]*"
)  # `18, not 17`
_OFFER = re.compile(
    r"(?:(?<=[.!?\n*])|\A)[\s*]*(?:would|do|shall|can|could|let me|(?:i )?hope|feel free|is there)\b[^.!?\n]*[.!?]?\s*\Z",
    re.I,
)
_TRUTH = re.compile(r"(yes|no|true|false),?\s+(?:because|since|as)\b", re.I)
# words before and behind an expression that do not state it
_HEDGE = re.compile(
    r"(?:\bbetween [\s$\\\d.,]+ and|\b(?:not|never|maybe|perhaps|possibly|either|between|(?:could|might|may) (?:\w+ )?be)|n't)"
    r"\s+(?:be |equal (?:to )?)?[\s$*(]*$",
    re.I,
)
_DENIAL = re.compile(
    r"[\s$*)]*(?:is|was) (?:not (?:the|correct|right|possible|enough)|wrong|incorrect|impossible)\b", re.I
)
_REFUSAL = re.compile(
    r"\b(?:(?:do not|don't|cannot|can't|(?:unable|not able) to) (?:know|answer|solve|determine)|not sure|not enough information)\b",
    re.I,
)
_UNFINISHED = re.compile(
    r"(?:[-+*/=^×÷(]|\\\w+|(?<!\bit )\b(?:is|are|equals|the|of|and|or|so|because|then|if|to))[\s,]*$"
)
_CORRECTED = re.compile(r"\b(?:rounds?|rounded|which is|meaning)\b")
_COMPOUND = r"\b\d+ (?:hours?|minutes?|days?|weeks?|years?|feet|ft|pounds?|dollars?)(?:,| and)* \d+ (?:minutes?|seconds?|hours?|days?|months?|inches|in|ounces?|cents?)\b"
# one piece of an expression in text: a compound amount, a time, a date, a number, a variable, a command, an operator or
# a bracket
_PIECE = re.compile(
    rf"(?i:{_COMPOUND}|\b\d\d?(?::[0-5]\d)?\s?[ap]\.?m\b|\b\d\d?:[0-5]\d\b|\b{MONTH}\s\d\d?\b(?:, \d{{4}})?|\b\d\d?\s{MONTH}(?: \d{{4}})?)|"
    r"\d[\d,]*\.?\d*|\.\d+|\\[a-zA-Z]+|\\?\$|[€£¥]|[-+*/^_=<>|!%(){}\[\]π√∞·×÷±−–°]|\\[{}]|,(?=\s*[-\d(\\])"
    r"|(?<![A-Za-z])[A-Za-z](?![A-Za-z'])"
)
_EDGES = re.compile(r"^(?:[aAI]\s+|=>\s*|[,)\]}*/^=!%|]+\s*|[-+]\s+(?=[a-zA-Z]\b))+|(?:\s+[aAI])+$|[\s,*/_([{=+-]+$")
_SPELLED = re.compile(rf"\b(?:(?:{'|'.join(NUMBER_WORDS)})\b[\s-]*(?:and\s)?)+(?<!\bone )", re.I)
_VERB = re.compile(
    r"\b(?:is|are|was|were|has|have|had|so|therefore|thus|hence|equals|gets?|answer|makes?|costs?|pays?|earns?|needs?)\b",
    re.I,
)
_SHORT = 4  # words of a text that is an answer as a whole
_MARKS = 50  # marks from the end that may be headings
_END = 2000  # characters at the end of a response without a mark that are read


def read_response(text: str) -> str:
    """Return the answer that a response states, after its thoughts and before another question."""
    text = _THOUGHTS.sub("", _SPECIAL.sub("", text))
    for question in islice(_NEXT_QUESTION.finditer(text), 5):
        before = text[: question.start()]
        if _PHRASE.search(before) or _find_marked(before) is not None:
            text = before
            break
    if finals := list(_FINAL.finditer(text)):
        text = text[finals[-1].start() :]
    if tagged := _TAGGED.findall(text):
        text = tagged[-1]
    marked = _find_marked(text)
    return ((_read_end(text) or [""])[-1] if marked is None else marked).strip()


def read_reference(text: str) -> list[str]:
    """Return the possible answers of a reference: the marked one, the text as a whole, or the numbers at its end."""
    if (marked := _find_marked(text)) is not None:
        return [marked.strip()]
    return [found.strip() for found in _read_end(text)] if _is_prose(text) else [text.strip()]


def _find_marked(text: str) -> str | None:
    r"""Return the text after the last `####` or in the last `\boxed{}`, None if there is neither.

    Several that follow each other without a word are one list. `####` before a title is a heading of Markdown, and a
    box that was cut off is empty.
    """
    found = sorted([*_MARK.finditer(text), *_BOX.finditer(text)], key=re.Match.start, reverse=True)[:_MARKS]
    marked: list[str] = []
    last = None
    for index, match in enumerate(found):
        content, end = _read_line(text, match) if match.re is _MARK else _read_box(text, match)
        if last and (match.re is not last.re or end > last.start() or not _JOINT.fullmatch(text[end : last.start()])):
            break
        if match.re is _MARK and _is_heading(content, text[end:], earlier=len(found) > index + 1):
            continue
        if content not in marked:
            marked.insert(0, content)
        last = match
    return "; ".join(marked) if last else None


def _read_line(text: str, mark: re.Match[str]) -> tuple[str, int]:
    rest = text[mark.end() :].lstrip()
    line = rest.partition("\n")[0]
    end = len(text) - len(rest) + len(line)
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
    if not rest.strip():
        return False
    if re.match(r"(?:step|part|case|question|problem|example|method|solution)\s*\d*\s*[:.]?", line, re.I):
        return True
    if re.search(r"\d|\\", line):
        return re.match(r"\d+[.)]\s+[A-Z][a-z]", line) is not None
    return (earlier or bool(re.search(r"\d", rest))) and len(line) > 1


def _read_end(text: str) -> list[str]:
    """Return the possible answers of a text without a mark, the most likely one last.

    An answer stands after `the answer is`, or is a result or an expression in the last sentence with one.
    """
    text = re.sub(r"^\s*#+\s", "", text[-_END:], flags=re.M).rstrip()
    phrases = [
        each
        for each in _PHRASE.finditer(text)
        if not each[0] or _ANSWER.search(each[0]) or _is_last(text[each.end() :])
    ]
    if phrases:
        said = _read_phrase(text[phrases[-1].end() :])
        return _read_end(said) if _OPENING.match(said) and _is_prose(said) else [said]
    if truth := _TRUTH.match(text):
        return [truth[1]]
    text = _OFFER.sub("", text).rstrip("*. ")
    if text.endswith("?") or _UNFINISHED.search(text) or _REFUSAL.search(text):
        return []
    if ratio := _RATIO.search(text):
        return [ratio[1]]
    text = _CONTRAST.sub("", _CIRCUMSTANCE.sub(r"\1", _ASIDE.sub("", text))).rstrip()
    numbers = list(re.finditer(r"\d", text))
    spans = list(_SPAN.finditer(text))
    if spans and (not numbers or spans[-1].end() > numbers[-1].start()):
        listed = _last_listed(text, spans)
        if _is_hedged(text, listed[0].start(), listed[-1].end()):
            return []
        return ["; ".join(span[span.lastgroup or 0] for span in listed)]
    if len(text.split()) <= _SHORT and "=" not in text and re.match(r"[-+\d\\(\[{$€£.]|[A-J][.:)]\s", text):
        return [text]
    if not numbers:
        spelled = list(_SPELLED.finditer(text))
        return [text[spelled[-1].start() :]] if spelled else [text] if len(words_in(text)) <= 12 else []
    return _read_expressions(text, numbers[-1].start())


def _last_listed(text: str, spans: list[re.Match[str]]) -> list[re.Match[str]]:
    """Return the last formulas of a text that are one list: only `and` or `or` separates them, for one name."""
    first = len(spans) - 1
    while first:
        one, other = spans[first - 1 : first + 1]
        joint = text[one.end() : other.start()].strip()
        names = {span[span.lastgroup or 0].partition("=")[0].strip() for span in (one, other) if "=" in span[0]}
        if not joint or not _NEXT_SPAN.fullmatch(joint) or len(names) > 1:
            break
        first -= 1
    return spans[first:]


def _is_last(text: str) -> bool:
    """Return whether no number follows the first sentence of a text."""
    return re.search(r"\d", "".join(_SENTENCE.split(text.lstrip(), maxsplit=1)[1:])) is None


def _read_phrase(text: str) -> str:
    if bold := re.match(r"[*_:\s]*?(\*{1,3})(?=[^\s*])", text):  # also its end
        text = text[bold.end() :].replace(bold[1], "", 1)
    text = _ADVERB.sub("", text.lstrip("*_: \n\t"), count=1)
    spans, at, joint = [], 0, ""
    while span := _SPAN.match(text, at):
        spans.append(span[span.lastgroup or 0])
        between = _NEXT_SPAN.match(text, span.end())
        joint = between[0] if between else ""
        at = span.end() + len(joint)
    if spans and "or" in joint and (number := re.match(r"-?[\d.,]*\d", text[at:])):
        return f"{'; '.join(spans)} or {number[0]}"
    if len(spans) == 1 and (unit := _UNIT_BEHIND.match(text, at)) and unit[1] != "in":
        return rf"{spans[0]} \text{{{unit[1]}}}"
    if spans:
        return "; ".join(spans)
    return _CONTRAST.sub("", _REASON.sub("", _SENTENCE.split(text, maxsplit=1)[0]))


def _read_expressions(text: str, at: int) -> list[str]:
    """Return the last result after `=` in the sentence with a position, or the sentence's expressions up to there."""
    runs: list[tuple[int, int]] = []
    for piece in _PIECE.finditer(text):
        gap = text[runs[-1][1] : piece.start()].strip() if runs else ""
        if runs and (not gap or gap == "or" or (gap == "and" and "=" in text[slice(*runs[-1])])):
            runs[-1] = runs[-1][0], piece.end()
        else:
            runs.append(piece.span())
    sentence = max((match.end() for match in _SENTENCE.finditer(text, 0, at)), default=0)
    runs = [run for run in runs if run[1] > sentence and run[0] <= at and re.search(r"\d", text[slice(*run)])]
    results = [run for run in runs if re.search(r"=\s*[^\s=]*\d", text[slice(*run)])]
    if results and not _CORRECTED.search(text[results[-1][1] :]):
        runs = results[-1:]
    return [] if _is_hedged(text, *runs[-1]) else [_read_run(text, *run) for run in runs]


def _is_hedged(text: str, start: int, end: int) -> bool:
    """Return whether the words around an expression do not state it as the answer."""
    stop = _SENTENCE.search(text, end)
    return bool(_HEDGE.search(text[:start]) or _DENIAL.match(text, end) or (stop and stop[0] == "?"))


def _read_run(text: str, start: int, end: int) -> str:
    """Return an expression without what belongs to its sentence, and with a word of magnitude behind it."""
    found = _EDGES.sub("", text[start:end].strip(" ,*_"))
    if found.count("(") < found.count(")"):
        found = found.rstrip(")")
    if (behind := re.match(r"\s*([a-zA-Z]+)", text[end:])) and behind[1].lower() in SCALES:
        found = f"{found} {behind[1]}"
    return found.rpartition("=")[2].strip() if re.fullmatch(r"[^a-zA-Z\\]*", found) else found


def _is_prose(text: str) -> bool:
    """Return whether a reference is sentences about its answer: several lines of words, or a sentence with a verb."""
    if not re.search(r"\d|\\|\$", text) or r"\begin" in text:
        return False
    bare = re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}", " ", text).strip()
    return len(words_in(bare)) >= 2 and (_VERB.search(bare) is not None or "\n" in bare)
