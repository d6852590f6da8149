"""The prose lint: docstrings, names and messages as CONTRIBUTING.md asks for; `make lint` runs it.

python tests/prose.py [FILE ...]      # default: every file of allocation/ and areal_like/
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENINGS = re.compile(r"(?:What|Whose|Of|Those|That|Who|Have)\b")
NOUNS = re.compile(r"(?:The|A|An|Whether|How|All|Each|One|Any)\b")  # of functions, which start with a verb
# Relative clauses in the place of nouns, which docstrings and comments have at most MOST times per 1,000 words
CLAUSES = re.compile(
    r"\b(?:what(?:ever)?|whoever|those (?:that|of|which|who|whose|in|with|from|for|at|on|by)|that of|of (?:which|whom))\b",
    re.IGNORECASE,
)
MOST = 1.0
NO_NOUN = re.compile(r"\b(?:is|are|was|were) no (?!longer\b|more\b|one\b|other\b)[a-z]")
PREPOSITIONS = {
    "about",
    "above",
    "across",
    "after",
    "apart",
    "at",
    "before",
    "below",
    "beside",
    "between",
    "beyond",
    "by",
}
PREPOSITIONS |= {
    "for",
    "from",
    "in",
    "into",
    "of",
    "on",
    "onto",
    "over",
    "per",
    "than",
    "through",
    "to",
    "under",
    "with",
}
PREPOSITIONS |= {"within", "without"}
PARTICIPLES = {
    "asked",
    "begun",
    "bound",
    "built",
    "chosen",
    "done",
    "drawn",
    "found",
    "given",
    "gone",
    "held",
    "hidden",
}
PARTICIPLES |= {
    "kept",
    "known",
    "laid",
    "left",
    "lent",
    "made",
    "meant",
    "paid",
    "said",
    "sent",
    "shown",
    "sought",
    "spelt",
}
PARTICIPLES |= {"spoken", "taken", "told", "torn", "understood", "worn", "written"}
VERBS_IN_ED = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"}


def main(files: list[str]) -> int:
    """Print every violation; return 1 if there is one."""
    paths = [Path(file) for file in files] or [
        path for package in ("allocation", "areal_like") for path in sorted((ROOT / package).rglob("*.py"))
    ]
    classes = {name for path in paths for name in class_names(ast.parse(path.read_text()))}
    found = [f"{path}:{line}: {problem}" for path in paths for line, problem in problems(path, classes)]
    if not files:
        found += too_many_clauses(paths)
    print("\n".join(found) or "prose: no violations")
    return 1 if found else 0


def too_many_clauses(paths: list[Path]) -> list[str]:
    """Return the clauses of all files with their lines, if there are more than MOST per 1,000 words."""
    words, clauses = 0, list[str]()
    for path in paths:
        for line, text in comments(path):
            words += len(re.findall(r"[A-Za-z]+", text))
            clauses += [f'{path}:{line}: "{clause}" in the place of a noun' for clause in CLAUSES.findall(text)]
    share = 1000 * len(clauses) / words
    return [*clauses, f"{share:.2f} clauses per 1,000 words; the limit is {MOST}"] if share > MOST else []


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings and comments of a file."""
    code = path.read_text()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def class_names(tree: ast.AST) -> Iterator[str]:
    """Yield names of classes with two capitalised parts, which no sentence has by chance."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and re.match(r"[A-Z][a-z]+[A-Z]", node.name):
            yield node.name


def problems(path: Path, classes: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and problem of everything in a file that breaks a rule."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.Module) and OPENINGS.match(doc := ast.get_docstring(node) or ""):
            yield getattr(node, "lineno", 1), f'docstring opens with "{doc.split()[0]}": start with a noun'
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from of_function(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NO_NOUN.search(node.value):
            yield node.lineno, f'"{NO_NOUN.search(node.value)[0]}…": write "is not a …", "missing" or "unknown"'  # type: ignore[index]
        if isinstance(node, ast.Raise) or is_message(node):
            yield from of_message(node, classes)


def of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    """Yield problems of a function's docstring and name."""
    doc, name = ast.get_docstring(node) or "", node.name.strip("_")
    decorators = {ast.unparse(each) for each in node.decorator_list}
    is_value = any("property" in each for each in decorators)
    is_rule = any(each.startswith("rule(") for each in decorators)  # its docstring states the rule
    if OPENINGS.match(doc) or (NOUNS.match(doc) and not is_value and not is_rule):
        yield node.lineno, f'docstring of {node.name} opens with "{doc.split()[0]}": start with a verb'
    is_participle = name in PARTICIPLES or (name.endswith("ed") and name.isalpha() and name not in VERBS_IN_ED)
    if not is_value and (name in PREPOSITIONS or is_participle):
        yield node.lineno, f"{node.name} is a bare participle or preposition: name a function by a verb"


def is_message(node: ast.AST) -> bool:
    """Whether a call reports something to the user."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("finding", "say", "complain")


def of_message(node: ast.AST, classes: set[str]) -> Iterator[tuple[int, str]]:
    """Yield classes of ours that a message names."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            for name in classes & set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", part.value)):
                yield part.lineno, f"a message names the class {name}: name the key that the user set"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
