"""Writes which options the pinned SGLang and Megatron-core have, next to their readers: part of `make lock`.

A configuration is checked against these tables in a moment, without importing either library. A row is
`name: {"types": [...], "choices": [...], "field": ...}`; areal_like/backends/options.py reads it.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1] / "areal_like"
MEGATRON, SGLANG = ROOT / "backends/megatron/options.json", ROOT / "backends/sglang/options.json"
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", types.NoneType: "null"}
_PARSED = {"int": ["a whole number"], "float": ["a number"], "human_readable_int": ["a whole number", "text"]}


def megatron_options() -> dict[str, dict[str, Any]]:
    """The fields of TransformerConfig."""
    from megatron.core.transformer import TransformerConfig

    hints = typing.get_type_hints(TransformerConfig)
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    table = {name: _row(list(_alternatives(hints[name]))) for name in names}
    backends = [member.name for member in hints["attention_backend"]]  # YAML has the names of its members
    return table | {"attention_backend": {"choices": backends}}


def sglang_options() -> dict[str, dict[str, Any]]:
    """What the server's parser takes, aliases included, by name with underscores."""
    from areal_like.backends.sglang.launcher import prepare_imports

    prepare_imports(cuda=False)
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    table = {}
    for action in parser._actions:
        row: dict[str, Any] = {}
        if action.choices:
            row["choices"] = sorted(action.choices) if isinstance(action.choices, set) else list(action.choices)
        else:
            named = getattr(action.type, "__name__", "str")
            row["types"] = ["true or false"] if action.nargs == 0 else _PARSED.get(named, ["text", "a number"])
        for option in action.option_strings:
            name = option.lstrip("-").replace("-", "_")
            table[name] = row | ({} if name == action.dest else {"field": action.dest})
    return table


def _row(alternatives: list[str | tuple[Any, ...]]) -> dict[str, Any]:
    words = list(dict.fromkeys(word for word in alternatives if isinstance(word, str)))
    if {*words} - {"null", "a Python object"}:
        words = [word for word in words if word != "a Python object"]  # YAML holds the others
    choices = [choice for found in alternatives if isinstance(found, tuple) for choice in found]
    return ({"types": words} if words else {}) | ({"choices": choices} if choices else {})


def _alternatives(annotation: Any) -> Iterator[str | tuple[Any, ...]]:
    """The types that an annotation allows, in a user's words; choices as a tuple."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _alternatives(argument)
    elif origin is typing.Literal:
        yield arguments
    elif origin is list:
        items = [word for word in _alternatives(arguments[0]) if isinstance(word, str)] if arguments else []
        plural = {"a whole number": " of whole numbers", "a number": " of numbers", "text": " of strings"}
        yield "a list" + (plural.get(items[0], "") if items else "")
    elif origin is tuple:
        yield f"a list of {len(arguments)}"
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return
    elif origin is not None or annotation is callable or annotation not in _WORDS:
        yield "a function" if "Callable" in str(annotation) else "a Python object"
    else:
        yield _WORDS[annotation]


if __name__ == "__main__":
    for file, options in ((MEGATRON, megatron_options), (SGLANG, sglang_options)):  # SGLang's bars Megatron afterwards
        if len(sys.argv) == 1 or sys.argv[1] == file.parent.name:
            rows = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(options().items()))
            file.write_text("{\n" + ",\n".join(rows) + "\n}\n")
