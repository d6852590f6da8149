r"""Comparison of final answers where math-verify is wrong: numbers with words and units, choices, text, lists.

`equal` compares whole answers exactly and asks math-verify about the rest. The table of its cases is
`tests/rewards/answers/`.
"""

import re
from collections.abc import Callable, Sequence

from areal_like.rewards.amounts import PRODUCT, is_unit, read_amount
from areal_like.rewards.notation import MONTH, plain, words_in

type Symbolic = Callable[[str, str], bool]

_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(([A-J])\)|\[([A-J])\]|([A-J])(?![\w'^]))[.):]?(?P<rest>.*)", re.I
)
_TIME = re.compile(r"(\d{1,2})(?::([0-5]\d)(?::([0-5]\d))?|(?=\s*[ap]\.?\s?m\b))\s*(?:([ap])\.?\s?m\b\.?)?", re.I)
_RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s*(?::|\bto\b)\s*\d+(?:\.\d+)?)+")
_LEFT = re.compile(
    r"((?:\\frac\{d\w\}\{d\w\}|[A-Za-z](?:_\{?\w+\}?)?(?:\([^()=]*\))?|\(\s*[a-z](?:\s*,\s*[a-z])*\s*\)))\s*(?:=|\\in(?![a-z]))\s*(?=[^=])"
)
_SEPARATOR = re.compile(r",(?!\d{3}(?!\d))|,(?<!\d,)|;|\b(?:and|or)\b|\\cup(?![a-z])|\\(?:lor|vee|land|wedge)(?![a-z])")
_OPEN, _CLOSE = "([{", ")]}"
# names of one set or value
_SYNONYMS = {
    r"\emptyset": ("no solution", "no solutions", "none", "empty set", "no real solutions", r"\{\}"),
    r"\infty": ("infinity", "positive infinity", "+\\infty", "inf"),
    r"-\infty": ("negative infinity", "minus infinity", "-inf"),
    "undefined": ("does not exist", "dne", "not defined", "doesn't exist"),
    "true": ("correct",),
    "false": ("incorrect",),
    r"(-\infty,\infty)": ("all real numbers", "all reals", "all real x", r"\mathbb{r}", r"\mathbb r", r"\r", r"\reals", r"(-\infty,+\infty)"),
}  # fmt: skip
_SYNONYM = {other.replace(" ", ""): name for name, others in _SYNONYMS.items() for other in others}
_TRUTHS = ("yes", "no", "true", "false")


def equal(given: str, wanted: str, symbolic: Symbolic) -> bool:
    """Return whether an answer equals the reference; `symbolic` compares expressions."""
    one, other = (_GROUND.sub("", plain(text)) for text in (given, wanted))
    if r"\pi" in one + other:
        one, other = _DEGREES.sub(r"\\frac{\1\\pi}{180}", one), _DEGREES.sub(r"\\frac{\1\\pi}{180}", other)
    moduli = [match[1] for text in (one, other) if (match := _MODULUS.search(text))]
    if len(set(moduli)) > 1:
        return False
    one, other = (re.sub(r"^[^=]*:[^=]*=\s*(?=\d+\s*:)", "", text) for text in (one, other))
    one, other = _MODULUS.sub("", one), _MODULUS.sub("", other)
    if not re.search(r"[\d\\]", one):
        one = _COPULA.sub("", one)
    one = _STATEMENT.sub("", one)
    if (r"\begin{pmatrix}" in one) != (r"\begin{pmatrix}" in other):
        one, other = _VECTOR.sub(_tuple, one), _VECTOR.sub(_tuple, other)
    if _split_bracket(one) or _split_bracket(other):
        one, other = (_UNIT_VECTORS.sub(_coordinates, text) for text in (one, other))
    if re.search(r"\+\s*[cCkK]$", other):  # a constant of integration
        one, other = (re.sub(r"\+\s*[cCkK]$", "+ C", text) for text in (one, other))
    one = _as_decimal_comma(one, other)
    one, other = (_join_bounds(text) for text in (one, other))
    one, other = (_REVERSED.sub(r"\2=\1", _CHAIN.sub(_ascending, _without_unit(text))) for text in (one, other))
    return _equal(one, other, symbolic)


_VECTOR = re.compile(r"^\\begin\{pmatrix\}((?:(?!\\\\).)*|[^&]*)\\end\{pmatrix\}$")
_UNIT_VECTOR = r"([-+]?)\s*((?:(?!\\hat|\\vec)[^-+ijk])*?)\s*(?:\\(?:hat|vec)\s*)?\{?\s*(?:\\[ij]math|([ijk]))\s*\}?"
_UNIT_VECTORS = re.compile(rf"^(?:\s*{_UNIT_VECTOR}\s*){{2,3}}$")
_CHAIN = re.compile(r"^([^<>\\]+)(>|\\ge\s)([^<>\\]+)(>|\\ge\s)([^<>\\]+)$")
_GROUND = re.compile(r"\s+\((?:since|because|as|from|i\.e\.)\b[^()]*\)$")
_CONJUNCTION = re.compile(r",?\s*(?:\band\b|\\land(?![a-z])|\\wedge(?![a-z])|&)\s*")
_BOUND = re.compile(r"([a-zA-Z])\s*(<|>|\\[lg]e\s)([^<>=]+)|([^<>=]+)(<|>|\\[lg]e\s)\s*([a-zA-Z])")
_TURNED = {"<": ">", ">": "<", r"\le ": r"\ge ", r"\ge ": r"\le "}
_MODULUS = re.compile(r"\s*\(?\s*\\?[pb]?mod\s*\{?\s*(\w+)\s*\}?\s*\)?$")
_COPULA = re.compile(r"^(?!(?:yes|no)\b).*\b(?:is|are|was|were|be|equals)\s+(?:on\s+)?", re.I)
_STATEMENT = re.compile(r"^(?:[a-z]{2,}\s+)+(?:is|are|equals)\s+(?=[\\\d(\[{-])", re.I)
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?")


def _points(text: str) -> list[str]:
    """Return `p=5, q=2; p=7, q=2` as tuples in the order of the names; nothing if a text is not like that."""
    assigned = [re.fullmatch(r"([a-zA-Z](?:_\w)?)\s*=\s*([^=<>]+)", part) for part in _elements(text)]
    names = [match[1] for match in assigned if match]
    width = len(set(names))
    if not width or len(names) < len(assigned) or len(names) % width or (width == 1 or width == len(names)):
        return []
    groups = [
        dict(zip(names[at : at + width], assigned[at : at + width], strict=True)) for at in range(0, len(names), width)
    ]
    if any(len(group) < width for group in groups):
        return []
    return [f"({', '.join(match[2].strip() for _, match in sorted(group.items()) if match)})" for group in groups]


def _tuple(vector: re.Match[str]) -> str:
    return f"({', '.join(re.split(r'\\\\|&', vector[1].strip().removesuffix(r'\\')))})"


def _coordinates(vector: re.Match[str]) -> str:
    """Return `2i - k` as `(2, 0, -1)`."""
    terms = {name: sign + (factor or "1") for sign, factor, name in re.findall(_UNIT_VECTOR, vector[0])}
    return f"({', '.join(terms.get(name, '0') for name in ('ijk' if 'k' in terms else 'ij'))})"


def _as_decimal_comma(given: str, wanted: str) -> str:
    """Return `3,5` as `3.5` if the reference is one number that is not an integer."""
    if "," in wanted or (amount := read_amount(wanted)) is None or amount.value.denominator == 1:
        return given
    return re.sub(r"^(\D*\d+),(\d{1,2}|\d{4,}|(?<=\b0,)\d+)(?![\d,.])", r"\1.\2", given)


def _join_bounds(text: str) -> str:
    """Return `x > 1 and x < 3` as `1 < x < 3`."""
    bounds = [_BOUND.fullmatch(part) for part in _CONJUNCTION.split(text)]
    if len(bounds) != 2 or bounds[0] is None or bounds[1] is None:
        return text
    (name, sign, limit), (other_name, other_sign, other_limit) = (
        (match[1], match[2], match[3]) if match[1] else (match[6], _TURNED[match[5]], match[4])
        for match in bounds
        if match
    )
    if name != other_name or (sign in ("<", r"\le ")) == (other_sign in ("<", r"\le ")):
        return text
    return f"{limit} {_TURNED[sign]}{name} {other_sign}{other_limit}"


def _ascending(chain: re.Match[str]) -> str:
    """Return `3 > x > 1` as `1 < x < 3`."""
    return "".join({">": "<", r"\ge ": r"\le "}.get(part, part) for part in reversed(chain.groups()))


def is_readable(answer: str) -> bool:
    """Return whether an answer can be compared as a whole: its brackets match, and it is not a text of many words."""
    text = plain(answer)
    depth = 0
    for character in re.sub(r"\\[{}]", "", text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0 and len(words_in(text)) <= _MOST_WORDS and _ENDS_WHOLE.search(text) is None


_MOST_WORDS = 12
_ENDS_WHOLE = re.compile(r"(?:[-+*/^=<]|\\(?:times|cdot|frac|sqrt|pm|le|ge|leq|geq|in|cup))\s*$")


def _equal(given: str, wanted: str, symbolic: Symbolic) -> bool:
    if not given or not wanted:
        return False
    if _squeeze(given) == _squeeze(wanted):
        return True
    for reader in (
        _as_truth, _as_date, _as_time, _as_ratio, _as_amount, _as_choice, _as_relation, _as_coordinates, _as_list, _as_bracket, _as_words,
    ):  # fmt: skip
        if (verdict := reader(given, wanted, symbolic)) is not None:
            return verdict
    return not _ELLIPSIS.search(given + wanted) and symbolic(given, wanted)


def _without_unit(text: str) -> str:
    """Return an expression without the unit behind it."""
    unit = _UNIT.search(text)
    if unit is None or read_amount(text):
        return text
    head = text[: unit.start()]
    if not re.search(r"[\\\d]", head) or words_in(head) or _TRIGONOMETRIC.search(head) or _TIME.fullmatch(text):
        return text
    return head if is_unit(unit[0].replace("^\\circ", "").strip()) else text


_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_UNIT = re.compile(
    r"(?<=[\w})])\s+(?:(?:sq|square|cubic|cu)\.? )?[a-z]{2,}(?:s|\.)?(?:\s?(?:/|per)\s?[a-z]+)?(?:\s*\^\s*\{?[123]\}?)?$"
    r"|\s*\^\s*\{?\\circ\s*\}?$",
    re.I,
)


_SYMBOL_BEHIND = re.compile(r"\d\s*[a-zA-Z]{1,3}$")  # `5 MW` is not `5 mW`


def _squeeze(text: str) -> str:
    """Return a text without spaces, and without case if it is words; synonyms have one name."""
    squeezed = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # `3 1/2` is not `31/2`
    if squeezed.casefold() in _SYNONYM:
        return _SYNONYM[squeezed.casefold()]
    return squeezed.casefold() if words_in(text) and not _SYMBOL_BEHIND.search(text) else squeezed


def _as_truth(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    """Compare yes and no, ignoring the rest."""
    if wanted.casefold() in _TRUTHS and (first := re.match(r"([a-z]+)\s*[,.;:]", given, re.I)):
        return first[1].casefold() == wanted.casefold()
    return None


def _as_date(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    """Compare dates; one without a year fits each year."""
    one, other = _date(given), _date(wanted)
    if one is None or other is None:
        return False if other and read_amount(given) else None
    return one[1:] == other[1:] and (one[0] == other[0] or None in (one[0], other[0]))


def _date(text: str) -> tuple[str | None, int, str] | None:
    if match := re.fullmatch(r"(\d{4})[-/](\d\d?)[-/](\d\d?)", text):
        return match[1], int(match[2]), match[3].lstrip("0")
    if match := re.fullmatch(r"(\d\d?)/(\d\d?)/(\d{4})", text):  # the month is first
        return match[3], int(match[1]), match[2].lstrip("0")
    month = _MONTH.search(text)
    digits = re.findall(r"(?<!\d)\d{1,2}(?!\d)|\d{4}", text)
    if month is None or re.search(r"[^\w\s,.]", text) or not 1 <= len(digits) <= 2 or len(words_in(text)) > 4:
        return None
    years = [each for each in digits if len(each) == 4]
    days = [each.lstrip("0") for each in digits if len(each) < 4]
    number = "janfebmaraprmayjunjulaugsepoctnovdec".index(month[0][:3].lower()) // 3 + 1
    return (years or [None])[0], number, (days or [""])[0]


_MONTH = re.compile(rf"\b{MONTH}", re.I)


def _as_time(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    one, other = (_TIME.fullmatch(_NAMED_TIME.sub(_time_of_name, text)) for text in (given, wanted))
    if one is None or other is None:
        return None
    if (one[2] or "00") != (other[2] or "00") or (one[3] or "00") != (other[3] or "00"):
        return False
    return bool(_hours(one) & _hours(other))


_NAMED_TIME = re.compile(
    r"(?:12(?::00)? )?\b(?:(noon)|midnight)|(?:\s?o'clock)?\sin the (?:(morning)|afternoon|evening)|\s?o'clock\b", re.I
)


def _time_of_name(name: re.Match[str]) -> str:
    if name[0].lower().endswith("o'clock"):
        return ":00"
    if name[0].lower().endswith(("noon", "midnight")) and " in the " not in name[0]:
        return "12:00 pm" if name[1] else "12:00 am"
    return " am" if name[2] else " pm"


def _hours(time: re.Match[str]) -> set[int]:
    """Return the hours that a time can mean: both halves of the day without `am` and `pm`."""
    hour = int(time[1])
    if time[4] is None:
        return {hour, (hour + 12) % 24} if 1 <= hour <= 12 else {hour}
    return {hour % 12 + 12 * (time[4].lower() == "p")} if hour <= 12 else {hour}


def _as_ratio(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    one, other = _RATIO.fullmatch(given), _RATIO.fullmatch(wanted)
    if one is None and other is None:
        return None
    if one and re.fullmatch(r"\d+(?:\.\d+)?\s*-\s*\d+(?:\.\d+)?", wanted):  # a range
        return re.split(r"\s*\bto\b\s*", given) == re.split(r"\s*-\s*", wanted)
    if one is None or other is None:
        return False
    left, right = ([float(n) for n in re.findall(r"[\d.]+", text)] for text in (given, wanted))
    return len(left) == len(right) and all(a * right[0] == b * left[0] for a, b in zip(left, right, strict=True))


def _as_amount(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    other = read_amount(wanted) if "=" not in wanted else None
    if other is None:
        return False if _TIME.fullmatch(wanted) and read_amount(given) else None
    if re.search(r"\d[a-zA-Z]$", wanted) and not re.search(r"\d[kKMB]$", wanted):  # a product with a variable
        return None
    if one := read_amount(given):
        return one.equals(other)
    if remark := re.fullmatch(r"(.*[a-z])\s+\((.*\d.*)\)", given):  # `160 minutes (2 hours and 40 minutes)`
        one, again = read_amount(remark[1]), read_amount(remark[2])
        return one is not None and again is not None and one.equals(other) and one.equals(again)
    if "=" in _outside_brackets(given) and sum("=" in each for each in _elements(given)) == 1:
        sides = [read_amount(side.strip()) for side in given.split("=")]
        if sides[0] and sides[0].equals(other) and all(side and side.unit and side.equals(sides[0]) for side in sides):
            return True
        return _equal(given.rpartition("=")[2].strip(), wanted, symbolic)
    return None


def _as_choice(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    """Compare letters of a choice; the text after a letter does not decide, and text alone is compared with it."""
    letters = [re.fullmatch(r"([A-J]+)|[A-J](?:(?:\W|\band\b)+[A-J])+", text) for text in (given, wanted)]
    if letters[0] and letters[1] and len(wanted) > 1 and any(match[1] for match in letters if match):
        return sorted(re.findall(r"[A-J]", wanted)) == sorted(re.findall(r"[A-J]", given))
    other = _CHOICE.fullmatch(wanted)
    if other is None or not _is_choice(other, wanted) or re.fullmatch("[a-j]", wanted):
        rest = one["rest"].strip(" .:") if (one := _CHOICE.fullmatch(given)) and _is_choice(one, given) else ""
        return True if rest and _equal(rest, wanted, symbolic) else None
    if (one := _CHOICE.fullmatch(given)) and _is_choice(one, given):
        return len({(match[1] or match[2] or match[3]).upper() for match in (one, other)}) == 1
    return bool(other["rest"].strip()) and _equal(given, other["rest"].strip(" .:"), symbolic)


def _is_choice(match: re.Match[str], text: str) -> bool:
    """Return whether a letter is a choice, not a variable or an article: alone or marked, or in capitals."""
    letter, rest = match[1] or match[2] or match[3], match["rest"].strip()
    if re.match(r"(?:and|or|&)\s+\W?[A-J]\b", rest):
        return False
    marked = bool(match[1] or match[2]) or re.match(r"\w[.):]", text) is not None
    return (not rest and (letter.isupper() or marked or len(text) == 1)) or (
        bool(rest) and marked and not (_OPERATOR if match[1] or match[2] else _PART).match(rest)
    )


_OPERATOR = re.compile(r"[\^_+*/=,('-]|\\(?:cup|cap|times|cdot|pm|l|g|n|in|sub)")
_PART = re.compile(r"[\^_+*/=,('\\-]")


def _as_relation(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    """Compare values of the same variable; a value without a variable fits each."""
    one, other = _LEFT.match(given), _LEFT.match(wanted)
    if _SEPARATOR.search(_outside_brackets(given + wanted)):
        return None
    if one and other:
        value = given[one.end() :]
        if (f := _FUNCTION.fullmatch(one[1])) and (g := _FUNCTION.fullmatch(other[1])) and f[1] == g[1]:
            value = re.sub(rf"(?<![a-zA-Z\\]){f[2]}(?![a-zA-Z])", g[2], value)  # `f(n) = n + 1` is `f(x) = x + 1`
        elif len({_name_left(each[1]) for each in (one, other)}) > 1:
            return None
        return _equal(value, wanted[other.end() :], symbolic)
    if one and "=" not in wanted and not _INEQUALITY.search(wanted):
        return _equal(given[one.end() :], wanted, symbolic)
    if other and "=" not in given and not _INEQUALITY.search(given) and "=" not in wanted[other.end() :]:
        return _equal(given, wanted[other.end() :], symbolic)
    return None


_FUNCTION = re.compile(r"([a-zA-Z])\(([a-zA-Z])\)")


def _name_left(text: str) -> str:
    """Return a left side; a function of x is y."""
    return re.sub(r"^[fgh]\(x\)$", "y", text.replace(" ", ""))


_TUPLE = re.compile(r"\([a-z](?:\s*,\s*[a-z])+\)\s*=\s*(?=\()")
_ELLIPSIS = re.compile(r"\.\.\.|\\[lc]?dots")
_REVERSED = re.compile(r"^([^=<>]*[^=<>\s\\][^=<>]*?)\s*=\s*([a-zA-Z])$")
_INEQUALITY = re.compile(r"[<>]|\\(?:[lg]eq?|ne|neq)(?![a-z])")


def _as_coordinates(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    """Compare `x = 1, y = 2` with `(1, 2)`."""
    if "=" in wanted and (_split_bracket(given) or _TUPLE.match(given)):
        given, wanted = wanted, given
    if named_tuple := _TUPLE.match(wanted):
        wanted = wanted[named_tuple.end() :]
    values = [] if _split_bracket(wanted) is None else _elements(given)
    named = [match for value in values if (match := _LEFT.match(value))]
    names = [match[1] for match in named]
    if not names or len(names) < len(values) or len(names) > len(set(names)):
        return None
    by_name = {match[1]: value[match.end() :] for value, match in zip(values, named, strict=True)}
    coordinates = ", ".join(by_name[name] for name in sorted(by_name))
    return _equal(f"({coordinates})", wanted, symbolic)


def _as_list(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    r"""Compare lists without brackets, sets and unions: the same elements in any order."""
    one, other = (_points(text) or _elements(text) for text in (given, wanted))
    if len(other) > 1 and "[" not in wanted and (brackets := re.fullmatch(r"\[([^\[\]()]*)\]", given)):
        one = _elements(brackets[1])
    if (
        len(other) == 1 < len(one)
        and re.search(r"\bor\b", given)
        and all(_equal(each, wanted, symbolic) for each in one)
    ):
        return True
    if len(one) == len(other) == 1 and not (_is_set(given) or _is_set(wanted)):
        return None
    if len(other) == 1 < len(one) and "=" in wanted and all("=" in each or r"\pm" in given for each in one):
        return symbolic(rf"\{{{','.join(each.rpartition('=')[2] for each in one)}\}}", wanted)  # roots of an equation
    if r"\emptyset" in (*one, *other) and _is_set(given) != _is_set(wanted):
        return False
    if r"\cup" in given + wanted and len(one) != len(other):
        return None
    if len(one) != len(other) and _INEQUALITY.search(given) and _INEQUALITY.search(wanted):
        return symbolic(*(r"\cup".join(map(_interval, each)) for each in (one, other)))
    if len(one) == len(other) == 1:
        return _equal(one[0], other[0], symbolic)
    return _same_elements(one, other, symbolic)


def _interval(inequality: str) -> str:
    """Return `x < a` and `x > a` as intervals."""
    if match := re.fullmatch(r"[a-zA-Z]\s*(<|>|\\[lg]e(?![a-z]))\s*([^<>]+)", inequality):
        ends = "[]" if "\\" in match[1] else "()"
        return rf"(-\infty, {match[2]}{ends[1]}" if match[1] in ("<", r"\le") else rf"{ends[0]}{match[2]}, \infty)"
    return inequality


def _same_elements(one: Sequence[str], other: Sequence[str], symbolic: Symbolic) -> bool:
    left = list(one)
    for element in other:
        found = next((index for index, each in enumerate(left) if _equal(each, element, symbolic)), None)
        if found is None:
            return False
        del left[found]
    return not left


def _is_set(text: str) -> bool:
    return re.fullmatch(r"\\?\{\s*\}", _outside_brackets(text).strip()) is not None


def _elements(text: str) -> list[str]:
    r"""Return the elements of a list or a set; `a \pm b` is two."""
    if (left := _LEFT.match(text)) and _is_set(text[left.end() :]):
        text = text[left.end() :]
    if _is_set(text):
        text = re.sub(r"^\\?\{|\\?\}$", "", text.strip())
    parts, start, outside = [], 0, _outside_brackets(text)
    for separator in _SEPARATOR.finditer(outside):
        parts.append(text[start : separator.start()])
        start = separator.end()
    parts = [part.strip() for part in [*parts, text[start:]] if part.strip()]
    if parts and (left := _LEFT.match(parts[0])) and len(parts) > 1 and not any("=" in part for part in parts[1:]):
        parts[0] = parts[0][left.end() :]
    return [signed for part in parts for signed in _both_signs(part)]


def _both_signs(part: str) -> list[str]:
    if len(re.findall(r"\\pm(?![a-z])", part)) != 1:
        return [part]
    return [re.sub(r"\\pm(?![a-z])", sign, part).removeprefix("+").strip() for sign in "+-"]


def _outside_brackets(text: str) -> str:
    """Return a text of the same length in which everything inside brackets and environments is a space."""
    depth, kept = 0, []
    text = re.sub(r"\\begin\{.*\\end\{", lambda match: "(" + " " * (len(match[0]) - 2) + " ", text, flags=re.S)
    for character in text:
        depth -= character in _CLOSE
        kept.append(character if depth <= 0 else " ")
        depth += character in _OPEN
    return "".join(kept)


def _as_bracket(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    """Compare tuples and intervals: the same brackets, and the same elements in order."""
    one, other = _split_bracket(given), _split_bracket(wanted)
    if one is None or other is None:
        return None
    if (one[0], one[-1]) != (other[0], other[-1]) or len(one) != len(other):
        return False
    return all(_equal(a, b, symbolic) for a, b in zip(one[1:-1], other[1:-1], strict=True))


def _split_bracket(text: str) -> list[str] | None:
    """Return the brackets of a tuple or interval and its elements between them, None if it is neither."""
    inner = _outside_brackets(text).strip()
    if len(inner) < 2 or inner[0] not in "([" or inner[-1] not in ")]" or inner[1:-1].strip():
        return None
    content = text.strip()[1:-1]
    outside = _outside_brackets(content)
    cuts = [match.start() for match in re.finditer(r"[,;]", outside)]
    parts = [content[a + 1 : b].strip() for a, b in zip([-1, *cuts], [*cuts, len(content)], strict=True)]
    return [inner[0], *parts, inner[-1]] if len(parts) > 1 else None


def _as_words(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    """Compare texts; a word is not a product of variables."""
    one, other = _words(given), _words(wanted)
    if one and one == other:
        return True
    if words_in(given) or words_in(wanted):
        return None if all(_is_product(text) for text in (given, wanted)) else False
    return None


def _is_product(text: str) -> bool:
    """Return whether the words of a text are products of variables."""
    words = words_in(text)
    is_expression = re.search(r"[-+=^*/\d]", text) is not None
    return all(PRODUCT.fullmatch(word) or (is_expression and len(word) <= 3) for word in words)


def _words(text: str) -> str:
    kept = [word for word in re.findall(r"[^\W_]+", text.casefold()) if word not in ("the", "a", "an")]
    return " ".join(kept) if re.fullmatch(r"[\w\s.,;:!?'\"()/-]*", text) and words_in(text) else ""
