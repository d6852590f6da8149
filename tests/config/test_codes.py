"""Every code of a finding is explained once, and nothing is explained that no finding has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import allocation.cli
import areal_like.__main__
from allocation.codes import UnknownCode, find
from allocation.codes import explanations as explanations_of_rules
from areal_like.codes import SUBJECTS, by_subject, explanations

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\b(?:ALLOC|CONVERT|RUN|CONFIG)(?:-[A-Z0-9]+)+\b")


def used() -> set[str]:
    """Codes within the texts of both packages' source, docstrings left out."""
    found: set[str] = set()
    for file in [*(ROOT / "allocation").rglob("*.py"), *(ROOT / "areal_like").rglob("*.py")]:
        if not CODE.search(text := file.read_text()):
            continue
        tree = ast.parse(text)
        documented = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        texts = {
            id(part) for node in documented for part in ast.walk(node.value) if isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                found |= set(CODE.findall(node.value))
    return found


def test_there_are_few_codes() -> None:
    assert len(explanations()) <= 220


def test_every_code_is_explained_and_every_explained_code_is_used() -> None:
    in_help = {"RUN-MEGATRON-CONTEXT", "ALLOC-HEADS"}  # of explain-code
    assert used() | in_help == set(explanations())


def test_a_code_is_explained_in_one_place() -> None:
    own = [code for entries in by_subject().values() for code in entries]
    assert len(own) == len(set(own))
    assert not set(own) & set(explanations_of_rules())
    files = {file.stem for file in (ROOT / "areal_like/codes").glob("*.toml")}
    assert files == set(SUBJECTS)


def test_an_explanation_has_all_its_parts_in_full_sentences() -> None:
    for code, entry in explanations().items():
        assert entry.code == code and entry.example.strip(), code
        assert re.fullmatch(r"[\w`].*[^.]", entry.title), code
        assert entry.cause.endswith(".") and entry.fix.endswith("."), code
    titles = [entry.title for entry in explanations().values()]
    assert [title for title in titles if titles.count(title) > 1] == []


@pytest.mark.parametrize(
    ("app", "code", "words"),
    [
        (
            areal_like.__main__.app,
            "RUN-MEGATRON-CONTEXT",
            ["RUN-MEGATRON-CONTEXT: ", "Example:", "Fix: Set `cp_comm_type=p2p`"],
        ),
        (areal_like.__main__.app, "config-value", ["CONFIG-VALUE: ", "gconfig.n_samples=many"]),
        (
            areal_like.__main__.app,
            "ALLOC-HEADS",
            ["ALLOC-HEADS: ", "allocation check megatron:d1t8 --model Qwen2.5-7B"],
        ),
        (allocation.cli.app, "ALLOC-HEADS", ["ALLOC-HEADS: ", "Source: Megatron-LM"]),
    ],
)
def test_a_code_is_explained_on_the_command_line(app, code, words) -> None:
    result = CliRunner().invoke(app, ["explain-code", code])
    assert result.exit_code == 0, result.output
    for text in words:
        assert text in result.stdout


@pytest.mark.parametrize(
    ("app", "code", "nearest"),
    [
        (areal_like.__main__.app, "RUN-MEGATRON-CONTXT", "RUN-MEGATRON-CONTEXT"),
        (areal_like.__main__.app, "RUN-SHARED", "RUN-SHARED-PROMPTS"),
        (allocation.cli.app, "ALLOC-HEAD", "ALLOC-HEADS"),
        (allocation.cli.app, "RUN-SHARING-IPC", "areal-like explain-code RUN-SHARING-IPC"),
    ],
)
def test_of_an_unknown_code_the_nearest_is_named(app, code, nearest) -> None:
    result = CliRunner(env={"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, ["explain-code", code])
    assert result.exit_code == 2
    assert nearest in result.output


def test_a_code_like_no_other_is_only_refused() -> None:
    with pytest.raises(UnknownCode, match=r"^No finding has the code 17\. $"):
        find("17", explanations())
