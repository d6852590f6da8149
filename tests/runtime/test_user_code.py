"""A user's own code is found by name, in a file or a package, and what is wrong with it is told by line."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from areal_like.core.user_code import Portable, UserCodeError, absolute, load_object, register


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_is_run_once_and_finds_what_lies_beside_it(tmp_path):
    write(tmp_path / "beside_it.py", "unit = 2\n")
    file = write(tmp_path / "own.py", "from beside_it import unit\ndef double(x): return unit * x\nother = double(3)\n")
    assert load_object(f"{file}:double")(4) == 8
    assert load_object(f"{file}:other") == 6


def test_a_module_is_imported():
    assert load_object("json:dumps")([1]) == "[1]"


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("def score(:\n", "score", "line 1: "),
        ("\nimport not_there\n", "score", "line 2: ModuleNotFoundError: No module named 'not_there'"),
        ("raise SystemExit(3)\n", "score", "line 1: SystemExit: 3"),
        ("def scor(): ...\n", "score", "has no 'score'; it has scor"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path, text, name, told):
    file = write(tmp_path / f"wrong{abs(hash(text))}.py", text)
    with pytest.raises(UserCodeError, match=r"wrong\d+\.py") as caught:
        load_object(f"{file}:{name}")
    assert told in str(caught.value)


@pytest.mark.parametrize("reference", ["score", "missing.py:score", "no.such.package:score", "json:not a name", ":x"])
def test_what_names_nothing_is_refused(reference):
    with pytest.raises(UserCodeError):
        load_object(reference)


def test_a_reference_survives_another_working_directory(tmp_path, monkeypatch):
    write(tmp_path / "here.py", "value = 7\n")
    monkeypatch.chdir(tmp_path)
    reference = absolute("here.py:value")
    monkeypatch.chdir("/")
    assert load_object(reference) == 7
    assert absolute("json:dumps") == "json:dumps"


def test_objects_are_found_under_their_names_while_they_are_given():
    def score():
        return 1

    def other():
        return 2

    other.__name__ = "score"
    with register({"reward.function": score, "workflow": other, "algorithm": "grpo"}) as names:
        assert names == {
            "reward.function": "given:reward.score",
            "workflow": "given:workflow.score",
            "algorithm": "grpo",
        }
        assert [load_object(names[key]) for key in ("reward.function", "workflow")] == [score, other]
    with pytest.raises(UserCodeError, match=r"reward\.score was given by the Python code that called train\(\)"):
        load_object("given:reward.score")


def test_a_function_of_no_importable_module_reaches_another_process(tmp_path):
    factor = 3
    with register({"reward.function": lambda x: factor * x}) as names:
        portable = Portable.pack(names["reward.function"])
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).load()(4))"
    sent = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(portable), capture_output=True, check=True)
    assert sent.stdout == b"12\n"


def test_what_travels_by_value_is_made_once_in_a_process():
    """A judge that holds much is asked for its parameters and for its judgements: two of it would be held."""
    with register({"reward.function": lambda response, row: 1.0}) as names:
        portable, again = (Portable.pack(names["reward.function"]) for _ in range(2))
    assert portable.load() is again.load()


def test_what_has_a_name_travels_by_it(tmp_path):
    write(tmp_path / "named.py", "def one(): return 1\n")
    portable = Portable.pack(f"{tmp_path}/named.py:one")
    assert portable.by_value is None
    assert portable.load()() == 1


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    with register({"reward.function": lambda: lock}) as names, pytest.raises(UserCodeError, match="cannot be sent"):
        Portable.pack(names["reward.function"])
