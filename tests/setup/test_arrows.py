"""Folders import what lies below them; modules form no circle, no long chain, and none imports many others."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 50  # lines of a function
CAPABILITIES = "areal_like.capabilities."
CORE = "areal_like.core"
CHAIN, FAN_OUT = 14, 14  # modules in a chain of imports, and modules of ours that one imports
# Modules that still import more, and at most how many. Those that no longer do are removed.
MORE = {
    "areal_like.backends.fsdp.engine": 19,
    "areal_like.backends.megatron.engine": 19,
    "areal_like.capabilities.replay.replayer": 19,
    "areal_like.capabilities.agents.episodes": 18,
    "areal_like.capabilities.agents.make": 19,
    "areal_like.capabilities.drift.alarm": 18,
    "areal_like.capabilities.replay.recorder": 18,
    "areal_like.capability": 18,
    "areal_like.preflight": 18,
    "areal_like.preflight.host_memory": 18,
    "areal_like.preflight.model": 18,
    "areal_like.run.directory": 17,
    "areal_like.preflight.resume": 16,
    "allocation.cli.predictions": 15,
    "areal_like.backends.megatron.conversion": 15,
    "areal_like.capabilities.operations.hook": 15,
    "areal_like.capabilities.replay.verdicts": 15,
    "areal_like.core.loop.loop": 15,
    "areal_like.preflight.data": 15,
    "areal_like.run.assemble": 15,
}
# Modules and folders of areal_like/ from the bottom up: each imports only those before it.
ORDER = [
    "core",
    "runtime",
    "demo",
    "data",
    "backends",
    "job",
    "known",
    "codes",
    "exclusions",
    "metrics",
    "exits",
    "rewards",
    "capability",
    "preflight",
    "interop",
    "run",
    "capabilities",
    "launch",
    "cli",
    "__main__",
]
# The same of areal_like/core/.
CORE_ORDER = [
    "columns",
    "sampling_masks",
    "types",
    "errors",
    "events",
    "signals",
    "gc_tuning",
    "transfer",
    "registry",
    "user_code",
    "config",
    "served_form",
    "algorithms",
    "checkpoint",
    "hooks",
    "rollout",
    "trainer",
    "weights",
    "loop",
]
# What modules of the core still import from above it.
UP = {
    "areal_like.core.loop.loop": {"areal_like.metrics.record"},
    "areal_like.core.loop.step": {"areal_like.metrics.record"},
}
# The same of allocation/.
COMPILER_ORDER = [
    "diagnostics",
    "grid",
    "gpus",
    "backends",
    "hardware",
    "efficiency",
    "families",
    "vision",
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
    "adapters",
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
    "cases",
    "cli",
    "__main__",
]


def modules(package: str) -> dict[str, Path]:
    """Return every module of a package by its dotted name."""
    files = sorted((ROOT / package).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


OWN = modules("areal_like")
COMPILER = modules("allocation")
BOTH = OWN | COMPILER


@cache
def tree_of(module: str) -> ast.Module:
    """Parse a module."""
    return ast.parse(BOTH[module].read_text())


def imports(module: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every module that one imports, also within functions and for types alone."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno} imports relatively"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield node.lineno, member if member in BOTH else str(node.module)


@cache
def graph() -> dict[str, set[str]]:
    """Return the modules of ours that each imports."""
    return {module: {name for _, name in imports(module) if name in BOTH and name != module} for module in BOTH}


@pytest.mark.parametrize(
    ("package", "order"), [("areal_like", ORDER), (CORE, CORE_ORDER), ("allocation", COMPILER_ORDER)]
)
def test_each_part_imports_only_parts_below_it(package, order):
    own = {module for module in BOTH if module.startswith(f"{package}.")}

    def place(module: str) -> int:
        return order.index(module.removeprefix(f"{package}.").split(".")[0])

    wrong = [
        f"{module} imports {name}"
        for module in own - {CORE}
        for name in graph()[module] & own - {CORE}
        if place(name) > place(module) and name not in UP.get(module, ())
    ]
    assert wrong == []


def test_the_core_imports_nothing_else_of_the_engine():
    """So that it can be read alone. Arrows that are gone are removed from `UP`."""
    up = {
        module: found
        for module, names in graph().items()
        if module.startswith(CORE) and (found := {name for name in names & OWN.keys() if not name.startswith(CORE)})
    }
    assert up == UP


def test_only_a_capability_imports_a_capability_only_itself_and_its_needs():
    """So that its folder can be deleted; the rest finds capabilities by `areal_like.core.registry`."""

    def folder(module: str) -> str:
        return module.removeprefix(CAPABILITIES).split(".")[0] if module.startswith(CAPABILITIES) else ""

    needs = {folder(module): names for module in OWN if (names := needs_of(module))}
    assert set(needs) == {"mcp", "sandbox"}
    wrong = [
        f"{module} imports {name}"
        for module, names in graph().items()
        for name in names
        if folder(name) and folder(name) not in {folder(module), *needs.get(folder(module), ())}
    ]
    assert wrong == []


def needs_of(module: str) -> list[str]:
    """Return the names in NEEDS of a capability's package."""
    values = [
        node.value
        for node in tree_of(module).body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "NEEDS" for target in node.targets)
    ]
    return [name for value in values for name in ast.literal_eval(value)]


def test_keys_of_capabilities_are_known_without_the_rest_of_them():
    """The configuration is complete before a capability is loaded, and `--help` answers at once."""
    light = {
        "schema": ("areal_like.core.config.section", "areal_like.core.config.ignored", "areal_like.core.config.added"),
        "commands": (),
    }
    wrong = [
        f"{module} imports {name}"
        for module in OWN
        if module.startswith(CAPABILITIES) and (allowed := light.get(module.rpartition(".")[2])) is not None
        for name in imported_at_once(module)
        if name in BOTH and name not in allowed
    ]
    assert wrong == []


def imported_at_once(module: str) -> Iterator[str]:
    """Yield the modules that the top level of one imports."""
    for node in tree_of(module).body:
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_modules_form_no_circle():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"circle: {' <- '.join(error.args[1])}")


def test_no_chain_of_imports_is_long():
    longest: dict[str, tuple[str, ...]] = {}
    for module in TopologicalSorter(graph()).static_order():
        longest[module] = (module, *max((longest[name] for name in graph()[module]), key=len, default=()))
    chain = max(longest.values(), key=len)
    assert len(chain) <= CHAIN, " <- ".join(chain)


def test_no_module_imports_many_of_ours():
    many = {module: len(names) for module, names in graph().items() if len(names) > FAN_OUT}
    assert {module: n for module, n in many.items() if n > MORE.get(module, FAN_OUT)} == {}
    assert MORE.keys() <= many.keys()


def test_no_function_is_longer_than_a_screen():
    long = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines"
        for module, file in BOTH.items()
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := node.end_lineno - node.lineno + 1) > LONGEST
    ]
    assert long == []


def test_class_names_have_one_meaning():
    names = Counter(
        node.name for tree in map(tree_of, BOTH) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, times in names.items() if times > 1] == []


def test_the_compiler_imports_nothing_of_the_engine():
    found = [
        f"{module}:{line}"
        for module in COMPILER
        for line, name in imports(module)
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
        if not module.startswith("areal_like.backends.sglang")
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := ENDPOINTS.search(node.value))
    ]
    assert found == []


def imports_sglang(module: str) -> bool:
    """Return whether a module imports SGLang, or our code that depends on it."""
    return any(name.split(".")[0] == "sglang" for _, name in imports(module))


def test_sglang_is_imported_by_its_launcher_and_patches_alone():
    folder = "areal_like.backends.sglang"
    allowed = re.compile(rf"{folder}\.(launcher|patches\..+)|{CAPABILITIES}\w+\.sglang")
    assert [module for module in OWN if imports_sglang(module) and not allowed.fullmatch(module)] == []
    wrong = [
        f"{module} imports {name}"
        for module, names in graph().items()
        for name in names
        if name.startswith(folder) and not (module.startswith(folder) or allowed.fullmatch(module))
    ]
    assert wrong == []


def test_patches_are_found_by_iteration_and_import_sglang_only_when_they_run():
    patches, inside = "areal_like.backends.sglang.patches.", "areal_like.backends.sglang.patches.inside"
    named = [
        f"{module} imports {name}"
        for module, names in graph().items()
        for name in names
        if name.startswith(patches) and not module.startswith(patches)
    ]
    assert named == []
    heavy = [
        module
        for module in OWN
        if module.startswith(patches) and not module.startswith(inside)
        for name in imported_at_once(module)
        if name.split(".")[0] in ("sglang", "torch") or name.startswith(inside)
    ]
    assert heavy == []


TEXTS = {"message", "help", "error", "errors"}  # of findings and errors, by the names that code gives them
READERS = {"partition", "rpartition", "split", "rsplit", "index", "find"}
PATTERNS = {"search", "match", "fullmatch", "findall", "finditer", "sub"}
# The modules that take such a text apart: of libraries and other processes, which have no facts, and two of ours.
READ_TEXTS = {
    "allocation.cli.arguments": "a help's names of Megatron, for which this command has options",
    "areal_like.backends.ray.workers": "Ray's",
    "areal_like.data.dataset": "problem and remedy of an ImageError",
    "areal_like.preflight.overrides": "the last line of a process that failed",
    "areal_like.capabilities.drift.alarm": "a server's answer",
    "areal_like.backends.fsdp.counting": "transformers'",
    "areal_like.backends.training.image_inputs": "transformers'",
}


def name_of(node: ast.AST) -> str:
    """Return the name of a value, also as `str(value)`, `value.strip()` or `value or ""`."""
    if isinstance(node, ast.Call):
        inner = node.func.value if isinstance(node.func, ast.Attribute) else [*node.args, node.func][0]
        return name_of(inner)
    return name_of(node.values[0]) if isinstance(node, ast.BoolOp) else getattr(node, "attr", getattr(node, "id", ""))


def read_texts(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that take the text of a finding or an error apart, by string methods or by a pattern."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            read = [node.func.value] if node.func.attr in READERS else node.args if node.func.attr in PATTERNS else []
            if TEXTS & {name_of(part) for part in read}:
                yield node.lineno


def test_findings_and_errors_are_told_apart_by_facts_and_not_by_their_texts():
    found = {module: list(read_texts(tree_of(module))) for module in BOTH}
    wrong = [f"{BOTH[module]}:{line}" for module, lines in found.items() for line in lines if module not in READ_TEXTS]
    assert wrong == []
    assert [module for module in READ_TEXTS if not found[module]] == [], "which no longer read one"
