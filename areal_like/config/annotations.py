"""Fields of a dataclass as its source file declares them: what an engine knows, without importing the engine."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_SCALARS: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (float, int), "str": (str,)}


def class_source(file: Path, name: str) -> ast.ClassDef | None:
    """A class at the top level of a Python file; None if the file or the class is not there."""
    return next((node for node in _body(file) if isinstance(node, ast.ClassDef) and node.name == name), None)


def constants(file: Path) -> dict[str, Any]:
    """The names at the top level of a Python file that stand for literals, such as lists of texts."""
    names: dict[str, Any] = {}
    for node in _body(file):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            names[target.id] = literal(node.value, names)
    return names


def literal(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression that is a literal or one of these names; None where it has to be computed."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def field_annotations(file: Path, name: str) -> dict[str, ast.expr]:
    """The annotation of each field of a dataclass, by name; none if the class is not there."""
    node = class_source(file, name)
    statements = [] if node is None else node.body
    return {
        statement.target.id: statement.annotation
        for statement in statements
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def fits(annotation: ast.expr, value: Any) -> bool:
    """Whether a value of a YAML file is of this type; types that no YAML value has, such as a callable, fit none."""
    name, arguments = _parts(annotation)
    match name:
        case "Optional":
            return value is None or fits(arguments[0], value)
        case "Union":
            return any(fits(argument, value) for argument in arguments)
        case "Literal":
            return any(value == ast.literal_eval(choice) for choice in arguments)
        case "list" | "List":
            return isinstance(value, list) and all(fits(arguments[0], item) for item in value if arguments)
        case "tuple" | "Tuple":
            return isinstance(value, list) and len(value) == len(arguments) and all(map(fits, arguments, value))
    if isinstance(value, bool):
        return name == "bool"
    return isinstance(value, _SCALARS.get(name, ()))


def describe(annotation: ast.expr) -> str:
    """A type in a user's words, such as `a whole number or null`."""
    name, arguments = _parts(annotation)
    words = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
    return {
        "Optional": lambda: f"{describe(arguments[0])} or null",
        "Union": lambda: " or ".join(map(describe, arguments)),
        "Literal": lambda: " or ".join(str(ast.literal_eval(choice)) for choice in arguments),
        "list": lambda: "a list",
        "List": lambda: "a list",
        "tuple": lambda: f"a list of {len(arguments)}",
        "Tuple": lambda: f"a list of {len(arguments)}",
    }.get(name, lambda: words.get(name, f"a {name} (not a YAML value)"))()


def call_keywords(node: ast.AST, function: str) -> Iterator[dict[str, ast.expr]]:
    """The keyword arguments of each call of `function` below a node."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == function:
            yield {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


@functools.cache
def _body(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []


def _parts(annotation: ast.expr) -> tuple[str, list[ast.expr]]:
    """`Union[int, str]` as `("Union", [int, str])`; `torch.dtype` as `("dtype", [])`."""
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice
        return _parts(annotation.value)[0], inner.elts if isinstance(inner, ast.Tuple) else [inner]
    return ast.unparse(annotation).rpartition(".")[2], []
