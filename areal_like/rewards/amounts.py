"""Numbers with the words and units around them, as exact fractions."""

import functools
import re
import tomllib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

_LONGEST = 2000  # digits or powers of ten of a number that is read here

_INTEGER = r"(?:\d{1,3}(?:(?:,|_|'| )\d{3})+(?!\d)|\d{1,2}(?:,\d\d)+,\d{3}(?!\d)|\d+)"
_EUROPEAN = r"\d{1,3}(?:(?:\.\d{3}){2,}(?:,\d+)?|(?:\.\d{3})+,\d+)(?![\d.,])"
_DECIMAL = rf"(?:{_EUROPEAN}|{_INTEGER}(?:\.\d+)?|\.\d+)"
_SIGNED = rf"[-+]?\s*{_DECIMAL}"
_TEN = r"10\s*\^\s*(?:\{\s*([-+]?\s*\d+)\s*\}|([-+]?\d+))"
_TIMES = r"\s*(?:\\times|\\cdot|[x*X])\s*"
_FRACTION = rf"\\frac\s*(?:\{{\s*({_SIGNED})\s*\}}|(\d))\s*(?:\{{\s*({_SIGNED})\s*\}}|(\d))"
_FORMS = [
    (name, re.compile(pattern))
    for name, pattern in (
        ("repeating", r"(\d*)\.(\d*?)(?:\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?|\((\d+)\)|(\d+?)\5{2,}\d*?\s*(?:\.\.\.|\\[lc]?dots))"),
        ("scientific", rf"({_DECIMAL}){_TIMES}{_TEN}"),
        ("power", _TEN),
        ("exponent", rf"({_DECIMAL})[eE]([-+]?\d+)"),
        ("mixed", rf"({_INTEGER})\s*{_FRACTION}|(\d+)(?:\s+|-|\s+and\s+)(\d+)\s*/\s*(\d+)"),
        ("latex", _FRACTION),
        ("base", r"([0-9a-zA-Z]+)\s*_\s*\{?\s*(\w+?)\s*\}?(?![\w}])|([0-9a-zA-Z]+)\s+(?:in\s+)?(?:base\s*(\w+))"),
        ("slash", rf"({_DECIMAL})\s*/\s*([-+]?{_DECIMAL})|(\d+) (?:out of|in) (\d+)$"),
        ("decimal", rf"({_DECIMAL})"),
    )
]  # fmt: skip
_SMALL = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen",
    "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = {word: n for n, word in enumerate(_SMALL)} | {word: 10 * n for n, word in enumerate(_TENS, 2)}
_POWERS = {"hundred": 100, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7, "billion": 10**9, "trillion": 10**12}  # fmt: skip
_SCALES = {word + end: Fraction(n) for word, n in (_POWERS | {"dozen": 12}).items() for end in ("", "s")} | {
    "gross": Fraction(144), "mn": Fraction(10**6), "bn": Fraction(10**9),
}  # fmt: skip
_ORDINALS = ["half", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth"]
_PARTS = {word: Fraction(1, n) for n, word in enumerate(_ORDINALS, 2)} | {
    "quarter": Fraction(1, 4), "hundredth": Fraction(1, 100), "thousandth": Fraction(1, 1000), "millionth": Fraction(1, 10**6), "tenthousandth": Fraction(1, 10**4),
}  # fmt: skip
_PLURAL_PARTS = {
    ("halves" if word == "half" else f"{word}s"): part for word, part in _PARTS.items() if word != "quarter"
}
NUMBER_WORDS = [*_WORDS, *_POWERS, "half"]
SCALES = {*_SCALES, *_PLURAL_PARTS}
_ATTACHED = {"k": 1000, "K": 1000, "M": 10**6, "B": 10**9, "T": 10**12, "bn": 10**9, "mn": 10**6}
# words beside a number that make it another one, or no one
_CHANGING = frozenset([
    "not", "no", "nor", "between", "least", "most", "less", "more", "fewer", "greater", "under", "over", "above", "below", "up", "than", "or",
    "to", "plus", "minus", "times", "divided", "squared", "cubed", "factorial", "percentile", "half", "pi", "remainder", "negative", "without",
    "never", "neither", "except", "out", "cannot", "any", "isn", "unknown", "twice", "double", "triple",
])  # fmt: skip
_DATA = tomllib.loads(Path(__file__).with_name("units.toml").read_text(encoding="utf-8"))
_CURRENCIES, _PREFIXES, _LONG_PREFIXES = (_DATA[name] for name in ("currencies", "prefixes", "long_prefixes"))
# the size of a unit, and its dimension as powers of gram, meter, second, ampere, month, ...
_UNITS: dict[str, tuple[Fraction, dict[str, int]]] = {
    name + end: (Fraction(size), {each: int(power) for each, power in re.findall(r"([a-zA-Z]+)(-?\d)", dimension)})
    for dimension, sizes in _DATA["dimensions"].items()
    for size, names in sizes.items()
    for name in names
    for end in ("s", "")
}
_ALIKE = [{"gbp1", "g1"}, {"celsius1", "A1s1"}, {"fahrenheit1", "A2g-1m-2s4"}]  # one name of two units: pounds, C, F
PRODUCT = re.compile(r"[a-d]{2,3}|[xyzt]{2,3}|[kmn]{2,3}|[p-s]{2,3}|[uvw]{2,3}")  # of variables
_LETTERS = frozenset("mghsLlAVWJNKCFTd")  # units of one letter


@dataclass(frozen=True)
class Amount:
    """A number, whether it is a percentage, and its unit if that is known: its dimension, which `value` counts."""

    value: Fraction
    is_percentage: bool = False
    unit: str = ""
    factor: Fraction = Fraction(1)

    def equals(self, other: "Amount") -> bool:
        """Return whether both are one amount; a missing unit fits each, and a percentage is a number or its part."""
        if self.unit and other.unit:
            if {self.unit, other.unit} in _ALIKE:
                return self.value == other.value
            return self.unit == other.unit and self.value * self.factor == other.value * other.factor
        if self.is_percentage == other.is_percentage:
            return self.value == other.value
        percentage, number = (self, other) if self.is_percentage else (other, self)
        return number.value in (percentage.value, percentage.value / 100)


def read_amount(text: str) -> Amount | None:
    """Return the amount that a text is, without its decoration, or None if it is anything else."""
    if len(text) > _LONGEST:
        return None
    return _read_amount(text)


@functools.lru_cache(4096)
def _read_amount(text: str) -> Amount | None:
    if (spelled := _read_spelled(text)) is not None:
        text = spelled
    text = re.sub(r"\$\s*(\d+) and (?=\d\d? cents)", r"\1 dollars and ", text)
    currency = next((name for sign, name in _CURRENCIES.items() if sign in text), "")
    if currency == "eur" and (comma := re.search(r"(?<![\d,.])(\d{1,3}(?:\.\d{3})+|\d+),(\d\d)(?!\d)", text)):
        text = f"{text[: comma.start()]}{comma[1].replace('.', '')}.{comma[2]}{text[comma.end() :]}"
    text = re.sub(r"\\?\$|[€£¥₹₩]", " ", text).strip()
    first = re.search(r"(?<![\w\\])[0-9A-F]+_\{?16\b|\d|(?<!\w)\.\d|\\frac", text)
    if first is None:
        return None
    if not (sign := _sign(text[: first.start()])) or not (literal := _literal(text[first.start() :])):
        return None
    value, rest = literal
    currency_word = re.search(r"\b(usd|eur|gbp|rs|inr|jpy)\b", text[: first.start()].lower())
    tail = _tail(rest, bool(currency))
    if tail is None:
        return _compound(text) if sign == 1 else None
    added, scale, percentage, unit = tail
    unit = unit or (currency_word[1] if currency_word else currency)
    dimension, factor = _unit(unit)
    return Amount(sign * (value + added) * scale, percentage, dimension, factor)


def _sign(prefix: str) -> int:
    """Return the sign that the text before a number gives it; 0 if that text makes it another number or none."""
    words = re.findall(r"[^\W\d_]+", prefix.lower())
    minus = [word for word in words if word in ("minus", "negative")]
    if any(word in _CHANGING - {"minus", "negative"} for word in words) or "\\" in prefix.replace("\\approx", ""):
        return 0
    if any(len(word) == 1 and word not in "ais" and not re.search(rf"\b{word}\s*=", prefix, re.I) for word in words):
        return 0
    signs = re.sub(r"(?<=[^\W\d_])-(?=[^\W\d_])", "", prefix)
    if (
        re.search(r"[^\w\s.,:;='\"+*\\~()/-]", signs)
        or signs.count("-") + signs.count("+") > 1
        or re.search(r"\w\s+-\s", signs)
    ):
        return 0
    return -1 if bool(minus) != ("-" in signs) else 1


def _literal(text: str) -> tuple[Fraction, str] | None:
    """Return the number that a text starts with, and the rest."""
    for name, pattern in _FORMS:
        if (match := pattern.match(text)) and (value := _value(name, list(match.groups()))) is not None:
            return value, text[match.end() :]
    return None


def _value(name: str, groups: list[str | None]) -> Fraction | None:
    given = [group for group in groups if group is not None]
    if name == "repeating":
        whole, fixed, repeated = groups[0] or "0", groups[1] or "", given[-1]
        tail = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
        return Fraction(f"{whole}.{fixed or 0}") + tail
    if name == "base":
        return _in_base(given[0], given[1])
    numbers = [_decimal(each) for each in given]
    if name in ("latex", "slash"):
        return numbers[0] / numbers[1] if numbers[1] else None
    if name == "mixed":
        return numbers[0] + numbers[1] / numbers[2] if numbers[2] and numbers[1] < numbers[2] else None
    if name in ("scientific", "exponent", "power"):
        mantissa = numbers[0] if len(numbers) > 1 else Fraction(1)
        return mantissa * Fraction(10) ** int(numbers[-1]) if abs(numbers[-1]) <= _LONGEST else None
    return numbers[0]


def _decimal(text: str) -> Fraction:
    if re.fullmatch(_EUROPEAN, text):
        text = text.replace(".", "").replace(",", ".")
    return Fraction(re.sub(r"[,_' ]", "", text).removeprefix("+"))


def _in_base(digits: str, base: str) -> Fraction | None:
    number = _WORDS.get(base.lower(), int(base) if base.isdigit() and len(base) < 3 else 0)
    try:
        return Fraction(int(digits, number)) if 2 <= number <= 36 else None
    except ValueError:
        return Fraction(-1, 10**9 + 7)  # no number of this base, and equal to none


def _tail(text: str, is_money: bool) -> tuple[Fraction, Fraction, bool, str] | None:
    """Return the addend in text after a number, its scale, whether it is a percentage, and its unit; None if
    unclear."""
    added, scale = Fraction(0), Fraction(1)
    if (attached := re.match(r"[a-zA-Z]{2}\S*", text)) and _looks_like_product(attached[0].rstrip(".,")):
        return None
    text = text.replace("ten-thousandth", "tenthousandth")
    if (letter := re.match(r"(k|K|M|B|T|bn|mn)(?![\w^])", text)) or (
        is_money and (letter := re.match(r"\s*([kKMBT])(?![\w^])", text))
    ):
        scale, text = Fraction(_ATTACHED[letter[1]]), text[letter.end() :]
    if half := re.match(r"\s*and (?:(a|one|two|three|four) )?(half|halves|thirds?|quarters?|fourths?|fifths?)\b", text):
        part = _PARTS.get(half[2].removesuffix("s"), Fraction(1, 2))
        added, text = _WORDS.get(half[1] or "", 1) * part, text[half.end() :]
    while word := re.match(r"[\s-]*(?:of an? )?([a-zA-Z]+)\b", text):
        name = word[1].lower()
        factor = _SCALES.get(name) or _PLURAL_PARTS.get(name)
        if factor is None:
            break
        scale, text = scale * factor, text[word.end() :]
    text = re.split(r"(?<!\b[ap])\.\s+(?=[A-Z(])|\s(?:because|since|which|where|as (?=\d))\b", text, maxsplit=1)[
        0
    ].strip(" .,;:")
    if match := re.match(r"%|per ?cent(?:age points?)?\b", text):
        rest = text[match.end() :].strip()
        return (added, scale, True, "") if is_unit(rest) else None
    if match := re.match(r"\^\s*\{?\s*\\circ\s*\}?", text):
        text = f"degrees {text[match.end() :].strip()}".strip()
    return (added, scale, False, text) if is_unit(text) else None


def _looks_like_product(text: str) -> bool:
    """Return whether letters directly behind a number are variables: powers, or neighbours in the alphabet."""
    return (PRODUCT.fullmatch(text) is not None or "^" in text) and not _unit(text)[0]


def is_unit(text: str) -> bool:
    """Return whether words after a number only name its unit."""
    text = re.sub(r"\([^\W\d_]{2}(?:[^\W\d_]|[ ,'-])*\)$", "", text).strip()
    text = re.sub(r"^([a-z]{3,}) of \d+ [a-z]{3,}$", r"\1", text)  # `5 boxes of 12 pencils`
    if not text:
        return True
    if r"\cdot" in text:
        return bool(_unit(text)[0])
    text = re.sub(r"^times(?:$| as (?:many|much|long|old|far|fast|big|large|tall|high|\w+)\b)", "", text)
    text = re.sub(r"^(?:more|fewer|less|extra)(?:$|\s+(?!than\b)(?=[a-z]))|\bleft over\b", "", text, flags=re.I)
    bare = re.sub(r"(?<=[a-zA-Z])\s?\^\s*\{?-?[123]\}?|(?<=[cdkm]m)[23]\b", "", text)
    if re.search(r"[^\w\s.,;:'\"/&!?()*-]|\d|_|-\s|\s-|/(?!\s?[a-zA-Z])|^[!*]", bare):
        return False
    words = re.findall(r"[^\W\d_]+", bare)
    lower = [word.lower() for word in words]
    if any(word in _CHANGING or word in _SCALES or word in _PLURAL_PARTS for word in lower):
        return False
    if "and" in lower and any(word in _WORDS or word in _PARTS for word in lower[lower.index("and") :]):
        return False
    if words and all(len(word) == 1 for word in words):
        return bool(_unit(text)[0])
    return not words or len(words[0]) > 1 or words[0] in _LETTERS or words[0] == "a"


@functools.lru_cache(1024)
def _unit(text: str) -> tuple[str, Fraction]:
    """Return the dimension and size of a unit; an empty dimension if it is unknown."""
    text = re.sub(r"\s*\(.*\)$", "", text.strip().strip(".")).replace(" per ", "/")
    text = re.sub(r"[{}]|\^(?=\s*\{?\s*\\?circ)", "", text.replace("\\cdot", " ").replace("*", " "))
    if temperature := re.match(r"degrees? ([CF])", text, re.I):
        text = "celsius" if temperature[1].lower() == "c" else "fahrenheit"
    text = {"mph": "mi/h", "kph": "km/h", "kmph": "km/h", "rs": "inr"}.get(text.lower(), text)
    size, powers = Fraction(1), dict[str, int]()
    above, *below = text.split("/")
    for sign, part in [(1, above), *((-1, part) for part in below)]:
        part = re.sub(
            r"\b(sq|square|cubic|cu)\b\.? ([a-zA-Z]+)", lambda m: f"{m[2]}^{2 if m[1][0] == 's' else 3}", part
        )
        part = re.sub(r"\b([a-zA-Z]+) (squared|cubed)\b", lambda m: f"{m[1]}^{2 if m[2][0] == 's' else 3}", part)
        if not (factors := re.findall(r"\s*([a-zA-Z]+)\s*(?:\^?\s*(-?[123]))?", part)):
            return "", Fraction(1)
        for name, power in factors:
            if (found := _size_of(name)) is None:
                return "", Fraction(1)
            exponent = sign * int(power or 1)
            size *= found[0] ** exponent
            for each, of_unit in found[1].items():
                powers[each] = powers.get(each, 0) + of_unit * exponent
    return "".join(f"{each}{power}" for each, power in sorted(powers.items()) if power), size


def _size_of(name: str) -> tuple[Fraction, dict[str, int]] | None:
    """Return the size and the dimension of one unit, which may have a prefix."""
    if found := _UNITS.get(name) or _UNITS.get(name.lower() if len(name) > 2 else name):
        return found
    if name[1:] in _DATA["metric"] and name[0] in _PREFIXES:
        size, powers = _UNITS[name[1:]]
        return size * Fraction(10) ** _PREFIXES[name[0]], powers
    for prefix, power in _LONG_PREFIXES.items():
        if name.lower().startswith(prefix) and (found := _UNITS.get(name.lower().removeprefix(prefix))):
            return found[0] * Fraction(10) ** power, found[1]
    return None


def _compound(text: str) -> Amount | None:
    """Return the sum of amounts of one dimension, such as hours and minutes."""
    parts = re.findall(r"\s*(?:,|and)?\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]{1,8})\b\.?", text)
    if len(parts) < 2 or re.sub(r"\s*(?:,|and)?\s*\d+(?:\.\d+)?\s*[a-zA-Z]{1,8}\b\.?", "", text).strip():
        return None
    units = [_unit(name) for _, name in parts]
    if len({dimension for dimension, _ in units}) != 1 or not units[0][0]:
        return None
    total = sum((Fraction(number) * factor for (number, _), (_, factor) in zip(parts, units, strict=True)), Fraction(0))
    return Amount(total / units[0][1], False, *units[0])


def _read_spelled(text: str) -> str | None:
    """Return a text whose number is in words with digits instead, None if it has none."""
    words = re.findall(r"[a-z]+|[^a-z\s]+", text.lower().replace("-", " "))
    if not words or words[0] not in _WORDS.keys() | {"half", "a", "minus", "negative"} or re.search(r"\d", text):
        return None
    sign = words.pop(0) if words[0] in ("minus", "negative") else ""
    if words[:1] in (["half"], ["a"]) and len(words) > (words[0] == "a"):
        words = words[words[0] == "a" :]
        if words[0] == "half":
            return f"{sign}1/2 {' '.join(words[1:]).removeprefix('of ').removeprefix('a ')}".strip()
        words.insert(0, "one")
    total = current = 0
    end = 0
    for index, word in enumerate(words):
        if word in _WORDS:
            current += _WORDS[word]
        elif word == "hundred":
            current *= 100
        elif word in _POWERS:
            total, current = total + current * _POWERS[word], 0
        elif word == "and" and index + 1 < len(words) and words[index + 1] in _WORDS and total + current >= 100:
            continue
        else:
            break
        end = index + 1
    if end == 0:
        return None
    rest = words[end:]
    part = _PARTS.get(rest[0]) or _PLURAL_PARTS.get(rest[0]) or _PARTS.get(rest[0].removesuffix("s")) if rest else None
    if part and (rest[0] != "quarters" or total + current < 4):  # more of them are coins
        return f"{sign}{total + current}/{part.denominator} {' '.join(rest[1:])}".strip()
    return f"{sign}{total + current} {' '.join(rest)}".strip()
