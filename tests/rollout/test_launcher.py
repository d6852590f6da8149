"""What a server does not import, and does not wait for when it ends."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from areal_like.rollout.sglang.launcher import end_at_once
from areal_like.rollout.sglang.patches.other_models import leave_out_other_models

VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"
FILES = {"qwen3": "class Qwen3ForCausalLM(Module):", "qwen3_vl": "x = Qwen3ForCausalLM()", "llama": "class Llama:"}


@pytest.fixture(autouse=True)
def its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An SGLang with the models of FILES."""
    names = ("sglang", "sglang.srt", "sglang.srt.models")
    modules = [ModuleType(name) for name in names]
    for parent, child in pairwise(modules):
        setattr(parent, child.__name__.rpartition(".")[2], child)
    modules[-1].__path__ = [str(tmp_path)]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, code in FILES.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(VARIABLE)


def test_only_the_module_with_the_model_is_imported() -> None:
    leave_out_other_models(["Qwen3ForCausalLM"])
    assert set(os.environ[VARIABLE].split(",")) == {"qwen3_vl", "llama"}


def test_all_are_imported_for_a_model_that_is_in_none() -> None:
    leave_out_other_models(["Qwen4ForCausalLM"])
    assert VARIABLE not in os.environ


def test_a_users_own_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "llama")
    leave_out_other_models(["Qwen3ForCausalLM"])
    assert os.environ[VARIABLE] == "llama"


def test_nothing_is_examined_before_a_server_ends_but_what_the_user_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, other = "SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
    monkeypatch.setenv(asked, "1")
    monkeypatch.setenv(other, "")  # so that it is put back
    monkeypatch.delenv(other)
    end_at_once()
    assert (os.environ[asked], os.environ[other]) == ("1", "0")
