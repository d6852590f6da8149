r"""Removal of decoration around an answer: Markdown, LaTeX's layout, Unicode's signs."""

import re
from collections.abc import Callable

_CHARACTERS = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u2010": "-", "\u2011": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ",
    "\u2219": r"\cdot ", "\u00f7": r"\div ", "\u00b1": r"\pm ", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ",
    "\u2260": r"\ne ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u2205": r"\emptyset ", "\u00b0": r"^\circ ", "\u00b2": "^2",
    "\u00b3": "^3", "\u2044": "/", "\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u3002": ".", "\uff0c": ",", "\uff1a": ":",
    "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u211d": r"\mathbb{R}", "\u03b8": r"\theta ", "\u2026": "...", "\uff05": "%", "\u2248": r"\approx ",
    "\u00bd": " 1/2", "\u2153": " 1/3", "\u2154": " 2/3", "\u00bc": " 1/4", "\u00be": " 3/4", "\u215b": " 1/8", "\u2070": "^0", "\u00b9": "^1",
    "\u2074": "^4", "\u2075": "^5", "\u2076": "^6", "\u2077": "^7", "\u2078": "^8", "\u2079": "^9",
    "\u00a2": " cents", "\u207b": "^-", "\uff0d": "-", "\uff08": "(", "\uff09": ")", "\uff0b": "+", "\uff1d": "=",
}  # fmt: skip
_TABLE = str.maketrans(_CHARACTERS | {chr(0xFF10 + digit): str(digit) for digit in range(10)})
MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?"
    r"|dec(?:ember)?)\b"
)
_STYLES = r"text(?:bf|it|rm|normal|sf|tt)?|math(?:bf|rm|it|sf|tt|normal)|mbox|hbox|boxed|fbox|boldsymbol|bm|operatorname\*?|emph|underline|ensuremath"
_PATTERNS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"<\|[^<>|]*\|>|</?s>|<eos>|<pad>|<end_of_turn>|<\uff5c[^<>]*\uff5c>", ""),
    (r"(?:\^-\^|\^-)(\d)", r"^{-\1}"),
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),
    (r"\\[dtc](frac|binom)(?![a-zA-Z])", r"\\\1"),
    (r"\b0x([0-9a-fA-F]+)\b", r"\1_{16}"),
    (r"\(\s*(\d[0-9A-F]*)\s*\)(?=\s*_)", r"\1"),  # of a base
    (r"\\equiv\s*(-?\d+)(\s*\(?\s*\\?[pb]?mod\s*\{?\s*)([1-9]\d*)", lambda match: rf"\equiv {int(match[1]) % int(match[3])}{match[2]}{match[3]}"),
    (r"(\\frac|\\sqrt(?:\[\w+\])?)\s*(\\(?:pi|alpha|beta|gamma|delta|theta|phi|lambda|mu|omega))(?![a-zA-Z])", r"\1{\2}"),
    (r"(\\frac\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\w))\s*(\\(?:pi|alpha|beta|gamma|delta|theta|phi|lambda|mu|omega))(?![a-zA-Z])", r"\1{\2}"),
    (r"(?<=\d)\s*(?:\\text\s*\{\s*--\s*\}|--)\s*(?=\d)", "-"),
    (r"\{?\s*(\w+)\s*\\choose\s*(\w+)\s*\}?", r"\\binom{\1}{\2}"),
    (r"\u221a\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
    (r"(?:\\sqrt|\u221a|\bsqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    (r"\\frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}", r"\\text{ \1/\2}"),
    (r"\\(le|ge|ne)q(?:slant)?(?![a-zA-Z])", r"\\\1 "),
    (r"\\([lg])t(?![a-zA-Z])", lambda match: "<" if match[1] == "l" else ">"),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
    (r"\\(?:degree|textdegree)(?![a-zA-Z])", r"^\\circ "),
    (r"[\^_]\{\s*\}", ""),
    (r"\\log_\{?e\}?(?![a-zA-Z])", r"\\ln"),
    (r"(?<=\d)!!+$", ""),
    (r"^([^'\"\\]*\d)'\s*(\d\d?)\"$", r"\1 ft \2 in"),
    (r"^([^'\"\\]*\d)'$", r"\1 ft"),
    (r"\{(?:,|\\[,; !])\}", ","),
    (r"\{:\}", ":"),
    (r"\\pi\s*\(", r"\\pi\\cdot("),  # else a function
    (r"^\[\s*(\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])+)\s*\]$", lambda match: _matrix(match[1])),
    (r"(?<!\\)\\!\s*", ""),
    (r"(?<!\\)\\(?:[,;:> ]|q?quad|thinspace(?![a-zA-Z]))|~", " "),
    (r"(?:(?<=\d)|(?<=[\d\s}][kM]))\s*(?:\\Omega(?![a-zA-Z])|[\u03a9\u2126])", " ohm"),
    (r"(?<=[\d\s}])(?:\\mu\s*|[\u00b5\u03bc])(?=[a-zA-Z]\b|\\(?:text|mathrm))", "u"),
    (r"\\[hvp]space\*?\{[^{}]*\}|\\phantom\{[^{}]*\}", " "),
    (r"(?<!\\)\\[()\[\]]", ""),
    (r"\\(?:lbrace|rbrace)(?![a-zA-Z])", lambda match: r"\{" if match[0][1] == "l" else r"\}"),
    (r"\\(?:[lr]vert|vert|mid)(?![a-zA-Z])", "|"),
    (r"\\%", "%"),
    (r"(\\(?:begin|end))\{(?:(?:[bBp]|small)?matrix\}|array\}(?:\{[lcr| ]*\})?)", r"\1{pmatrix}"),
    (r"\\langle(?![a-z])(.*?)\\rangle", r"(\1)"),
    (r"\bC_\{?(\w+)\}?\^\{?(\w+)\}?|\bC\^\{?(\w+)\}?_\{?(\w+)\}?", lambda match: rf"\binom{{{match[1] or match[4]}}}{{{match[2] or match[3]}}}"),
    (r"(?:\{\s*\})?[_^]\{?(\d+)\}?\s*C_\{?(\d+)\}?|\b(\d+)C(\d+)\b|\bC\((\d+), ?(\d+)\)", lambda match: r"\binom{{{}}}{{{}}}".format(*(each for each in match.groups() if each))),
    (r"(?:\{\s*\})?[_^]\{?(\d+)\}?\s*P_\{?(\d+)\}?|\b(\d+)P(\d+)\b|\bP\((\d+), ?(\d+)\)", lambda match: r"\frac{{{0}!}}{{({0}-{1})!}}".format(*(each for each in match.groups() if each))),
    (r"^all real (?:numbers|x) except (?:x\s*=\s*)?(.+)$", r"\\mathbb{R} \\setminus \\{\1\\}"),
    (r"\b[AP]_\{?(\d+)\}?\^\{?(\d+)\}?", r"\\frac{\1!}{(\1-\2)!}"),
    (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
    (r"(?:,\s*(?:where|for|with)?|\bwhere|\bfor|\()\s*[a-z](?:\s*,\s*[a-z])*\s*\\in\s*\\?(?:mathbb\s*)?\{?[NZQRC]\}?(?:\^?[+*]|_\+)?\)?\s*(\$?)$", r"\1"),
    (r"\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?[|:]\s*(?:[a-z]\s*\\in\s*\\mathbb\s*\{?R\}?\s*,\s*)?(?!.*\|.*\|)(.*)\\\}", r"\1"),
    (r"\\(?:text)?color\s*\{\w+\}", ""),
    (r"\\(?:displaystyle|textstyle|limits|nolimits|bf|rm|it|cal|tiny|small|normalsize|large|Large|LARGE|huge|Huge|therefore|implies|Rightarrow|longrightarrow|to)(?![a-zA-Z])|=>|[\u21d2\u2192\u2234]", " "),
    (r"[\u2705\u2713\u2714\ufe0f\U0001f300-\U0001faff]", ""),
    (r"\\(?:overline|overrightarrow|vec|widehat|bar|triangle|angle)(?:\s*\{\s*([A-Z]{1,4})\s*\}|\s+([A-Z]{2,4})(?![a-zA-Z]))", lambda match: f" {match[1] or match[2]}"),
    (r"(?<![\w*])\*\*(?=[^\s*])([^*]+)\*\*(?![\w*])", r"\1"),
    (r"[`]+|</?(?:b|i|strong|em|u|p|br|span|div)\b[^<>]*>", ""),
]  # fmt: skip


def _matrix(rows: str) -> str:
    """Return rows in brackets, `[1, 2], [3, 4]`, as a matrix."""
    lines = r" \\ ".join(row.replace(",", "&") for row in re.findall(r"\[([^\[\]]*)\]", rows))
    return rf"\begin{{pmatrix}}{lines}\end{{pmatrix}}"


_REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in _PATTERNS]
_STYLE = re.compile(rf"\\(?:{_STYLES})\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}(?:\^\{{?([123])\}}?)?")
_WRAPPER = re.compile(
    r"\*{1,3}([^*]+)\*{1,3}|__?([^_]+)__?|\"([^\"]+)\"|'([^']+)'|\$+([^$]+)\$+|\{((?:[^{},]|\\frac\{[^{}]*\}\{[^{}]*\})*)\}"
    r"|[(\[]\s*([-+]?[^()\[\],;]*\d[^()\[\],;]*)\s*[)\]]",
    re.S,
)
_FUNCTIONS = frozenset([
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "lg", "exp", "max", "min", "gcd", "lcm", "mod", "det", "lim", "arcsin", "arccos",
    "arctan", "sinh", "cosh", "tanh", "sqrt", "frac", "arg", "deg", "dim", "ker", "inf", "sup", "and", "or",
])  # fmt: skip


def plain(text: str) -> str:
    """Return an answer without its decoration; equal answers need not become equal texts."""
    text = text.translate(_TABLE).strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    for _ in range(4):
        text, before = _STYLE.sub(_without_style, text), text
        if text == before:
            break
    text = re.sub(r"\s+", " ", text).strip()
    if text.count("**") % 2:
        text = re.sub(r"^\*\*+|\*\*+$", "", text)
    for _ in range(4):
        before = text
        text = text.lstrip("=: ")
        if not text.endswith("..."):
            text = re.sub(r"(?:[\s.,;:]|(?<=[a-z]{2})!)+$", "", text)
        if match := _WRAPPER.fullmatch(text):
            text = match[match.lastindex or 0].strip()
        if text == before:
            return text
    return text


def _without_style(match: re.Match[str]) -> str:
    if len(match[1].strip()) <= 1 and " " not in match[1]:
        return match[1]
    return f" {match[1]}^{match[2]} " if match[2] else f" {match[1]} "


def words_in(text: str) -> list[str]:
    """Return the words of a text that are neither LaTeX's commands nor functions."""
    text = re.sub(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+", " ", text)
    return [word for word in re.findall(r"[^\W\d_]{2,}", text) if word.lower() not in _FUNCTIONS]
