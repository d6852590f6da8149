"""Folders import what lies below them or beside them, never what lies above; modules form no circle."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = "the run itself"  # every module of areal_like/ that is not named here
LAYERS = [
    {"types", "errors", "events", "runtime"},
    {"config"},
    {
        "algorithms",
        "checkpoint",
        "cluster",
        "data",
        "demo",
        "metrics",
        "rewards",
        "rollout",
        "trainer",
        "weights",
        "workflows",
    },
    {"experimental", "job"},
    {"preflight"},
    {"interop", "run"},
    {TOP},
]
COMPILER_TOP = "the package itself"  # `allocation/__init__.py`, the Python interface
# Modules and folders of allocation/ from the bottom up: each imports only those before it.
COMPILER_ORDER = [
    "diagnostics",
    "grid",
    "gpus",
    "hardware",
    "efficiency",
    "families",
    "pipeline",
    "notebook",
    "registry",
    "config_problems",
    "model_spec",
    "settings",
    "language",
    "resolve",
    "plan",
    "parameters",
    "memory",
    "placement",
    "rules",
    "nearest",
    "compiler",
    "convert",
    "codes",
    "planner",
    "views",
    "readers",
    COMPILER_TOP,
    "cases",
    "arguments",
    "cli",
    "__main__",
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def level(module: str) -> int:
    """Return the level of a module of areal_like: its folder's, its own (`types`, `job`), or the run's."""
    name = module.split(".")[1] if "." in module else TOP
    return LEVEL.get(name, LEVEL[TOP])


def modules(package: str) -> dict[str, Path]:
    """Return every module of a package by its dotted name."""
    files = sorted((ROOT / package).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


OWN = modules("areal_like")
COMPILER = modules("allocation")
BOTH = OWN | COMPILER


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of every module that a file imports, also within functions and for types alone."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno} imports relatively"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield node.lineno, member if member in BOTH else str(node.module)


def test_no_folder_imports_what_lies_above_it():
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for module, file in OWN.items()
        for line, name in imports(file)
        if name in OWN and level(name) > level(module)
    ]
    assert wrong == []


def test_each_part_of_the_compiler_imports_only_parts_below_it():
    def part(module: str) -> str:
        return module.split(".")[1] if "." in module else COMPILER_TOP

    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for module, file in COMPILER.items()
        for line, name in imports(file)
        if name in COMPILER
        and part(name) != part(module)
        and COMPILER_ORDER.index(part(name)) > COMPILER_ORDER.index(part(module))
    ]
    assert wrong == []


def test_modules_form_no_circle():
    graph = {module: {name for _, name in imports(file) if name in BOTH} for module, file in BOTH.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle: {' <- '.join(error.args[1])}")


def test_the_compiler_imports_nothing_of_the_engine():
    found = [
        f"{module}:{line}"
        for module, file in modules("allocation").items()
        for line, name in imports(file)
        if name.split(".")[0] == "areal_like"
    ]
    assert found == []


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by their names alone: a fresh checkout with two of one name cannot be tested."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("*.py"))
    assert [name for name, times in names.items() if times > 1 and name not in ("__init__.py", "conftest.py")] == []


ENDPOINTS = re.compile(
    r"/(generate|classify|abort_request|(pause|continue)_generation|(release|resume)_memory_occupation|v1/loads"
    r"|parse_function_call|(init|destroy)_weights_update_group|update_weights_from_\w+|(get_)?(model|server)_info"
    r"|health_generate|flush_cache)\b"
)


def test_endpoints_of_servers_are_named_only_where_sglang_is():
    """Everything else calls methods of Server."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno} names {match[0]}"
        for module, file in OWN.items()
        if not module.startswith("areal_like.rollout.sglang")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := ENDPOINTS.search(node.value))
    ]
    assert found == []
