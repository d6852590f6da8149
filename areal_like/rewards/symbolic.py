"""Mathematical equality of two answers in LaTeX, by math-verify.

Importing this module builds grammar tables, which takes seconds; the fork server of a `RewardPool` imports it once for
all workers.
"""

import logging
import re
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

# the caller limits the time: math-verify's own limit is an alarm signal, which cannot interrupt long calls in C
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn about the missing limit
_DECIMAL = re.compile(r"(?<![\w.])(\d*)\.(\d+)(?![\d.(\\])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_PRODUCT = re.compile(
    r"(?<![\w\\.])(\d+)(?!ln|log|sin|cos|tan|exp)([a-z]{1,3})(?![a-z(\d_])"
)  # math-verify takes letters behind a number for units
_POINTS = [sympy.Rational(tenths, 97) for tenths in (-262, -126, -58, 36, 81, 165, 281, 514)]
_DIGITS = 50
_PLACES = sympy.Float("1e-25", _DIGITS)


def equal(given: str, wanted: str) -> bool:
    """Return whether an answer equals the reference. May take long or never return.

    Only math-verify's LaTeX grammar reads the answers; its other reader would evaluate them as Python. Decimals are
    exact, because math-verify rounds to six places, and what it finds equal has to agree in numbers, because it takes
    small numbers for 0.
    """
    wanted, given = _one_logarithm(wanted, given)
    parsed = [parse(f"${_exact(text)}$", [LatexExtractionConfig()], parsing_timeout=None) for text in (wanted, given)]
    if not all(parsed):
        return False
    for each in parsed:
        if isinstance(each[0], sympy.MatrixExpr):
            each[0] = each[0].doit()
    if isinstance(parsed[0][0], sympy.Eq) and isinstance(parsed[1][0], sympy.FiniteSet):
        roots = sympy.solveset(parsed[0][0]) if len(parsed[0][0].free_symbols) == 1 else None
        return isinstance(roots, sympy.FiniteSet) and set(roots) == set(parsed[1][0])
    names = [getattr(each[0], "free_symbols", set()) for each in parsed]
    if (
        all(isinstance(each[0], sympy.core.relational.Relational | sympy.And) for each in parsed)
        and names[0] != names[1]
    ):
        return False
    sets = [_as_set(each[0]) for each in parsed]
    if sets[0] is not None and sets[0] == sets[1]:
        return True
    agree = _agree(parsed[0][0], parsed[1][0])
    if agree is not None:
        return agree
    return bool(verify(*parsed, timeout_seconds=None, allow_set_relation_comp=True))


def _as_set(relation: Any) -> Any:
    """Return the real numbers that fulfil inequalities in one variable, None for anything else."""
    if isinstance(relation, sympy.Set) and not isinstance(relation, sympy.FiniteSet):
        return relation
    if not isinstance(relation, (sympy.core.relational.Relational, sympy.And, sympy.Or)) or isinstance(
        relation, sympy.Eq
    ):
        return None
    if len(relation.free_symbols) != 1:
        return None
    name = next(iter(relation.free_symbols))
    try:
        return relation.subs(name, sympy.Symbol("x", real=True)).as_set()
    except Exception:  # noqa: BLE001 - sympy raises anything for unknown relations
        return None


def _one_logarithm(wanted: str, given: str) -> list[str]:
    """Return both answers with the natural logarithm if one has it: `\\log` without a base can mean it."""
    if any(re.search(r"\\ln(?![a-z])", text) for text in (wanted, given)):
        return [re.sub(r"\\log(?![a-z_])(?!\\s*_)", r"\\ln", text) for text in (wanted, given)]
    return [wanted, given]


def _exact(text: str) -> str:
    text = _PRODUCT.sub(lambda match: match[1] + "".join(f"{{{name}}}" for name in match[2]), text)
    text = re.sub(r"(?<![\w)}])(\w)!\s*\^", r"{(\1!)}^", text)
    if _TRIGONOMETRIC.search(text):
        text = _DEGREES.sub(r"{\\frac{\1\\pi}{180}}", text)
    text = re.sub(r"\}\s*(\d+(?!\.))", r"}{\1}", text)  # math-verify takes `\frac{a}{b}c} 1` for `\frac{a}{1}`
    return _DECIMAL.sub(lambda match: rf"\frac{{{match[1]}{match[2]}}}{{1{'0' * len(match[2])}}}", text)


def _agree(one: Any, other: Any) -> bool | None:
    """Return whether two expressions have the same real values where one has; None if numbers cannot say."""
    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return None
    one, other = (each.subs({name: sympy.I for name in each.free_symbols if str(name) == "i"}) for each in (one, other))
    one, other = (each.doit() if each.has(sympy.Sum, sympy.Product) else each for each in (one, other))
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if not symbols:
        one, other = (each.doit() for each in (one, other))
        if one.is_Rational and other.is_Rational:
            return bool(one == other)
        return _close(_number(one), _number(other))
    compared = 0
    for shift, point in enumerate(_POINTS):
        values = {
            symbol: point + sympy.Rational(59 * index, 97) * (-1) ** (shift + index)
            for index, symbol in enumerate(symbols)
        }
        left, right = _number(one.subs(values)), _number(other.subs(values))
        if left is None or right is None or not (_is_real(left) or _is_real(right)):
            continue
        if not _close(left, right):
            return False
        compared += 1
    return True if compared >= 3 else None


def _number(expression: Any) -> Any:
    try:
        number = expression.doit().evalf(_DIGITS)
        return number if number.is_number and number.is_finite else None
    except Exception:  # noqa: BLE001 - sympy raises anything for unknown expressions
        return None


def _is_real(number: Any) -> bool:
    return bool(abs(sympy.im(number)) <= 1e-20 * abs(number))


def _close(one: Any, other: Any) -> bool | None:
    if one is None or other is None:
        return None
    return bool(abs(one - other) <= _PLACES * max(abs(one), abs(other)))


equal("x^2 + 1", r"\frac{1}{2}")  # builds the tables and loads the parts of sympy that a first comparison needs
