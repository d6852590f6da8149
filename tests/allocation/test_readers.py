"""A file in place of a string: its registered reader has the word, the command only shows it."""

import json

import pytest
from typer.testing import CliRunner

import allocation
from allocation import readers
from allocation.cli import app
from allocation.diagnostics import Finding, Severity, Source
from allocation.readers import FileError, ReadFile, read_file


def ask(*words):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, words, prog_name="allocation")


class Installed:
    """An entry point whose reader knows two files, and what it was asked."""

    name = "test"
    asked: tuple = ()

    def load(self):
        return self.read

    def read(self, file, overrides):
        self.asked = (file, list(overrides))
        if file == "none.yaml":
            raise FileError("none.yaml cannot be read: there is no such file")
        if file == "good.yaml":
            note = Finding("TEST-NOTE", Severity.NOTE, "a note", Source("", "seed", ("good.yaml:2",)))
            return ReadFile((note,), allocation.compile("sglang:d2+megatron:d4"), "cluster 1x8, model x, batch 8x4")
        source = Source("sglang:d3t3", "rollout.backend + actor.backend", ("bad.yaml:3", "command line"))
        wrong = Finding("TEST-WRONG", Severity.ERROR, "too few", source, help="take more")
        return ReadFile((wrong,), None, "cluster 1x8, no model, no batch")


@pytest.fixture
def installed(monkeypatch):
    point = Installed()
    monkeypatch.setattr(readers, "entry_points", lambda *, group: [point])
    return point


def test_a_file_is_shown_as_its_reader_judged_it(installed):
    result = ask("check", "good.yaml", "a.b=1", "fsdp:d1", "c=2.yaml")
    assert (result.exit_code, installed.asked) == (0, ("good.yaml", ["a.b=1", "c=2.yaml"]))
    assert result.stdout.splitlines() == [
        "valid: good.yaml, 6 GPUs",
        "  checked with cluster 1x8, model x, batch 8x4",
        "note[TEST-NOTE] in seed (good.yaml:2): a note",
        "valid: fsdp:d1, 1 GPU",
    ]
    wrong = ask("check", "bad.yaml")
    assert wrong.exit_code == 1
    assert "error[TEST-WRONG] in rollout.backend (bad.yaml:3) + actor.backend (command line): too few" in wrong.stdout


def test_programs_get_key_and_place_apart(installed):
    (entry,) = json.loads(ask("check", "bad.yaml", "--json").stdout)
    assert (entry["file"], entry["allocation"], entry["valid"], entry["plan"]) == ("bad.yaml", None, False, None)
    (finding,) = entry["findings"]
    assert (finding["key"], finding["place"]) == ("rollout.backend + actor.backend", "bad.yaml:3 + command line")
    (entry,) = json.loads(ask("check", "good.yaml", "--json").stdout)
    assert (entry["n_gpus"], entry["findings"][0]["key"], entry["findings"][0]["place"]) == (6, "seed", "good.yaml:2")


def test_other_commands_use_the_files_plan(installed):
    assert ask("count", "good.yaml", "megatron:d3").stdout == "6\n3\n"
    assert "rollout: 2 sglang servers of 1 GPU" in ask("explain", "good.yaml").stdout
    assert set(json.loads(ask("groups", "good.yaml", "--json").stdout)) == {"rollout", "actor"}
    wrong = ask("count", "bad.yaml")
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert "TEST-WRONG" in wrong.stderr


@pytest.mark.parametrize(
    "option",
    [("--cluster", "1x8"), ("--model", "qwen3-0.6b"), ("--batch", "8x4"), ("--order", "tp-cp-ep-pp-dp")],
    ids=lambda option: option[0],
)
def test_what_a_file_says_itself_is_no_option(installed, option):
    result = ask("check", "good.yaml", *option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"good.yaml sets {option[0][2:]};" in result.stderr


def test_an_unreadable_file_is_wrong_usage(installed):
    result = ask("check", "none.yaml")
    assert result.exit_code == 2
    assert "none.yaml cannot be read" in result.stderr


def test_without_a_reader_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setattr(readers, "entry_points", lambda *, group: [])
    with pytest.raises(
        FileError, match=r"run\.yaml: no reader of run files is installed; install one with `pip install areal-like`"
    ):
        read_file("run.yaml")


def test_the_project_declares_its_reader():
    (point,) = readers.entry_points(group=readers.GROUP)
    assert (point.module, point.attr) == ("areal_like.preflight.reader", "read")
