"""What `areal-like COMMAND --help` gives as examples are commands that it takes."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from areal_like.__main__ import app
from areal_like.core.config.load import load
from areal_like.preflight.trainable import check_trainable

ROOT = Path(__file__).parents[2]
GROUP = typer.main.get_command(app)


def ask(*words: str) -> str:
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, words, prog_name="areal-like")
    assert result.exit_code == 0, result.output
    return result.stdout


def examples(text: str) -> list[list[str]]:
    """The words after `areal-like` of each line under `Examples:`."""
    found = re.findall(r"^ +areal-like (.+?) *$", text.partition("Examples:")[2].partition("╭")[0], re.MULTILINE)
    return [shlex.split(line.partition(" > ")[0]) for line in found]


def names() -> list[str]:
    return list(GROUP.commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", names())
def test_every_command_teaches_by_examples_that_it_takes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = examples(ask(command, "--help"))
    assert found
    for name, *words in found:
        assert name == command
        context = GROUP.commands[command].make_context(command, list(words))  # type: ignore[attr-defined]
        if model := context.params.get("model") if command == "check" else None:
            assert check_trainable(model, context.params["backend"]).trains
        elif command in ("run", "check"):
            load(context.params["config"], context.params["overrides"] or [])


def test_the_first_help_names_what_to_begin_with() -> None:
    text = ask("--help")
    assert [words[0] for words in examples(text)] == ["check", "run"]
    assert set(names()) <= set(re.findall(r"[\w-]+", text))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("check none.yaml", "none.yaml cannot be read: No such file or directory"),
        ("run none.yaml", "none.yaml cannot be read: No such file or directory"),
        ("check bytes", "bytes cannot be read"),
        ("check folder", "folder cannot be read: Is a directory"),
        ("check half.yaml", "half.yaml:2: the file is not valid YAML"),
        ("check code.yaml", "code.yaml:1: the file is not valid YAML"),
        ("run ok.yaml cluster.n_gpus_per_node=0", "0 should be greater than or equal to 1"),
        ("run ok.yaml cluster.n_nodes=1 cluster.n_gpus_per_node=1", "ALLOC-CLUSTER-SIZE"),
        ("run ok.yaml actor.path=nosuch", "nosuch is not a model directory"),
        ("run ok.yaml actor.no_such_key=1", "actor.no_such_key"),
        ("migrate none.sh", "none.sh cannot be read"),
        ("migrate bytes", "bytes cannot be read"),
        ("migrate ok.yaml --system foo", "'foo' is not one of areal, verl"),
        ("samples none", "none is not the directory of a run: none/run.json is missing"),
        ("samples folder", "folder is not the directory of a run: folder/run.json is missing"),
        ("samples run", "run has no samples of any training step; see stats_logger.samples"),
        ("report none", "none is not the directory of a run: none/run.json is missing"),
        ("report folder --output page.html --trace trace.json", "folder is not the directory of a run"),
        ("report folder folder --trace trace.json", "--trace needs exactly one run"),
        ("nosuch", "No such command 'nosuch'"),
    ],
)
def test_what_makes_no_sense_is_one_message_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("folder", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run/run.json").touch()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\0")
    (tmp_path / "half.yaml").write_text("actor: [")
    (tmp_path / "code.yaml").write_text('!!python/object/apply:os.system ["touch made"]')
    shutil.copy(ROOT / "examples/math/gsm8k_grpo_cpu.yaml", tmp_path / "ok.yaml")
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, shlex.split(words), prog_name="areal-like")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert said in re.sub(r"[\s│]+", " ", result.stderr)
    assert sorted(tmp_path.rglob("*")) == before
