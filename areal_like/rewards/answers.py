r"""Comparison of final answers where math-verify is wrong: numbers with words and units, choices, text, lists.

`equal` compares whole answers exactly and asks math-verify about the rest. The table of its cases is
`tests/rewards/answers/`.
"""

import re
from collections.abc import Callable, Sequence

from areal_like.rewards.amounts import is_unit, read_amount
from areal_like.rewards.notation import plain, words_in

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
_PRODUCT = re.compile(r"[a-d]{2,3}|[xyzt]{2,3}|[kmn]{2,3}|[p-s]{2,3}|[uvw]{2,3}")
_OPEN, _CLOSE = "([{", ")]}"
# names of one set or value
_SYNONYMS = {
    r"\emptyset": ("no solution", "no solutions", "none", "empty set", "no real solutions", r"\{\}"),
    r"\infty": ("infinity", "positive infinity", "+\\infty", "inf"),
    r"-\infty": ("negative infinity", "minus infinity", "-inf"),
    r"(-\infty,\infty)": (
        "all real numbers",
        "all reals",
        "\\mathbb{r}",
        "\\mathbb r",
        "\\r",
        "\\reals",
        "(-\\infty,+\\infty)",
        "all real x",
    ),
    "undefined": ("does not exist", "dne", "not defined", "doesn't exist"),
    "true": ("correct",),
    "false": ("incorrect",),
}
_SYNONYM = {other.replace(" ", ""): name for name, others in _SYNONYMS.items() for other in others}
_TRUTHS = ("yes", "no", "true", "false")


def equal(given: str, wanted: str, symbolic: Symbolic) -> bool:
    """Return whether an answer equals the reference; `symbolic` compares what only mathematics can."""
    one, other = plain(given), plain(wanted)
    if r"\pi" in one + other:
        one, other = _DEGREES.sub(r"\\frac{\1\\pi}{180}", one), _DEGREES.sub(r"\\frac{\1\\pi}{180}", other)
    moduli = [match[1] for text in (one, other) if (match := _MODULUS.search(text))]
    if len(set(moduli)) > 1:
        return False
    one, other = _MODULUS.sub("", one), _MODULUS.sub("", other)
    if not re.search(r"[\d\\]", one):
        one = _COPULA.sub("", one)
    if (r"\begin{pmatrix}" in one) != (r"\begin{pmatrix}" in other):
        one, other = _VECTOR.sub(_tuple, one), _VECTOR.sub(_tuple, other)
    if other.endswith("+ C"):
        one = re.sub(r"\+\s*[ckK]$", "+ C", one)
    one, other = (_REVERSED.sub(r"\2=\1", _ascending(_without_unit(text))) for text in (one, other))
    if re.match(r"[a-z]\s*=", other if _TUPLE.fullmatch(one) else one):  # `(x, y) = (1, 2)` is `x = 1, y = 2`
        one, other = _TUPLE.sub(_equations, one), _TUPLE.sub(_equations, other)
    return _equal(one, other, symbolic)


_VECTOR = re.compile(r"^\\begin\{pmatrix\}((?:(?!\\\\).)*|[^&]*)\\end\{pmatrix\}$")
_MODULUS = re.compile(r"\s*\(?\s*\\?[pb]?mod\s*\{?\s*(\w+)\s*\}?\s*\)?$")
_COPULA = re.compile(r"^(?!(?:yes|no)\b).*\b(?:is|are|was|were|be|equals)\s+(?:on\s+)?", re.I)
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?")


def _tuple(vector: re.Match[str]) -> str:
    return f"({', '.join(re.split(r'\\\\|&', vector[1].strip().removesuffix(r'\\')))})"


def _ascending(text: str) -> str:
    """Return `3 > x > 1` as `1 < x < 3`."""
    chain = re.fullmatch(r"([^<>\\]+)(>|\\ge\s)([^<>\\]+)(>|\\ge\s)([^<>\\]+)", text)
    if chain is None:
        return text
    less = {">": "<"}
    return f"{chain[5]}{less.get(chain[4], r'\le ')}{chain[3]}{less.get(chain[2], r'\le ')}{chain[1]}"


def _equations(match: re.Match[str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(match[1].split(","), match[2].split(","), strict=False))


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
        _as_truth,
        _as_date,
        _as_time,
        _as_ratio,
        _as_amount,
        _as_choice,
        _as_relation,
        _as_coordinates,
        _as_list,
        _as_bracket,
        _as_words,
    ):
        if (verdict := reader(given, wanted, symbolic)) is not None:
            return verdict
    return not _ELLIPSIS.search(given + wanted) and symbolic(given, wanted)


def _without_unit(text: str) -> str:
    """Return an expression without the unit behind it."""
    unit = _UNIT.search(text)
    if unit is None or read_amount(text):
        return text
    head = text[: unit.start()]
    is_math = (
        re.search(r"[\\\d]", head)
        and not words_in(head)
        and not _TRIGONOMETRIC.search(head)
        and not _TIME.fullmatch(text)
    )
    return head if is_math and is_unit(unit[0].replace("^\\circ", "").strip()) else text


_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_UNIT = re.compile(
    r"(?<=[\w})])\s+(?:(?:sq|square|cubic|cu)\.? )?[a-z]{2,}(?:s|\.)?(?:\s?(?:/|per)\s?[a-z]+)?(?:\s*\^\s*\{?[123]\}?)?$"
    r"|\s*\^\s*\{?\\circ\s*\}?$",
    re.I,
)


def _squeeze(text: str) -> str:
    """Return a text without spaces, and without case if it is words; synonyms have one name."""
    squeezed = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # `3 1/2` is not `31/2`
    if squeezed.casefold() in _SYNONYM:
        return _SYNONYM[squeezed.casefold()]
    return squeezed.casefold() if words_in(text) else squeezed


def _as_truth(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    """Compare yes and no, whatever follows them."""
    if wanted.casefold() in _TRUTHS and (first := re.match(r"([a-z]+)\s*[,.;:]", given, re.I)):
        return first[1].casefold() == wanted.casefold()
    return None


def _as_date(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    """Compare dates; one without a year fits each year."""
    one, other = _date(given), _date(wanted)
    if one is None or other is None:
        return None
    return one[1:] == other[1:] and (one[0] == other[0] or None in (one[0], other[0]))


def _date(text: str) -> tuple[str | None, int, str] | None:
    if match := re.fullmatch(r"(\d{4})[-/](\d\d?)[-/](\d\d?)", text):
        return match[1], int(match[2]), match[3].lstrip("0")
    month = _MONTH.search(text)
    digits = re.findall(r"(?<!\d)\d{1,2}(?!\d)|\d{4}", text)
    if month is None or re.search(r"[^\w\s,.]", text) or not 1 <= len(digits) <= 2 or len(words_in(text)) > 4:
        return None
    years = [each for each in digits if len(each) == 4]
    days = [each.lstrip("0") for each in digits if len(each) < 4]
    number = "janfebmaraprmayjunjulaugsepoctnovdec".index(month[0][:3].lower()) // 3 + 1
    return (years or [None])[0], number, (days or [""])[0]


_MONTH = re.compile(
    r"\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?"
    r"|dec(?:ember)?)\b",
    re.I,
)


def _as_time(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    one, other = _TIME.fullmatch(given), _TIME.fullmatch(wanted)
    if one is None or other is None:
        return None
    if (one[2] or "00") != (other[2] or "00") or (one[3] or "00") != (other[3] or "00"):
        return False
    return bool(_hours(one) & _hours(other))


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
    if "=" in given:
        return _equal(given.rpartition("=")[2].strip(), wanted, symbolic)
    return None


def _as_choice(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    """Compare letters of a choice; the text after a letter does not decide, and text alone is compared with it."""
    if re.fullmatch(r"[A-J]{2,6}", wanted) and re.fullmatch(r"[A-J](?:\W+[A-J])+", given):
        return sorted(wanted) == sorted(re.findall(r"\w", given))
    other = _CHOICE.fullmatch(wanted)
    if other is None or not _is_choice(other, wanted) or re.fullmatch("[a-j]", wanted):
        return None
    if (one := _CHOICE.fullmatch(given)) and _is_choice(one, given):
        letters = ((match[1] or match[2] or match[3]).upper() for match in (one, other))
        return len(set(letters)) == 1
    return bool(other["rest"].strip()) and _equal(given, other["rest"].strip(" .:"), symbolic)


def _is_choice(match: re.Match[str], text: str) -> bool:
    """Return whether a letter is a choice, not a variable or an article: alone or marked, or in capitals."""
    letter, rest = match[1] or match[2] or match[3], match["rest"].strip()
    marked = bool(match[1] or match[2]) or re.match(r"\w[.):]", text) is not None
    return (not rest and (letter.isupper() or marked or len(text) == 1)) or (
        bool(rest) and marked and not rest.startswith(("^", "_", "+", "-", "*", "/", "=", "\\", ",", "(", "'"))
    )


def _as_relation(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    """Compare what equals the same variable; a value without a variable fits each."""
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


_ELLIPSIS = re.compile(r"\.\.\.|\\[lc]?dots")
_TUPLE = re.compile(r"\(([a-z](?:\s*,\s*[a-z])+)\)\s*=\s*\(([^()]*)\)")
_REVERSED = re.compile(r"^([^=<>]*[^=<>\s\\][^=<>]*?)\s*=\s*([a-zA-Z])$")
_INEQUALITY = re.compile(r"[<>]|\\(?:[lg]eq?|ne|neq)(?![a-z])")


def _as_coordinates(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    """Compare `x = 1, y = 2` with `(1, 2)`."""
    if _split_bracket(given) is not None and "=" in wanted:
        given, wanted = wanted, given
    values = [] if _split_bracket(wanted) is None else _elements(given)
    named = [match for value in values if (match := _LEFT.match(value))]
    names = [match[1] for match in named]
    if not names or len(names) < len(values) or names != sorted(set(names)):
        return None
    coordinates = ", ".join(value[match.end() :] for value, match in zip(values, named, strict=True))
    return _equal(f"({coordinates})", wanted, symbolic)


def _as_list(given: str, wanted: str, symbolic: Symbolic) -> bool | None:
    r"""Compare lists without brackets, sets and unions: the same elements in any order."""
    one, other = _elements(given), _elements(wanted)
    if len(one) == len(other) == 1 and not (_is_set(given) or _is_set(wanted)):
        return None
    if len(other) == 1 < len(one) and "=" in wanted and all("=" in each or r"\pm" in given for each in one):
        return symbolic(rf"\{{{','.join(each.rpartition('=')[2] for each in one)}\}}", wanted)  # roots of an equation
    if r"\cup" in given + wanted and len(one) != len(other):
        return None
    if len(one) == len(other) == 1:
        return _equal(one[0], other[0], symbolic)
    return _same_elements(one, other, symbolic)


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
    return all(_PRODUCT.fullmatch(word) or (is_expression and len(word) <= 3) for word in words)


def _words(text: str) -> str:
    kept = [word for word in re.findall(r"[^\W_]+", text.casefold()) if word not in ("the", "a", "an")]
    return " ".join(kept) if re.fullmatch(r"[\w\s.,;:!?'\"()/-]*", text) and words_in(text) else ""
