"""Paths may begin with `~`, wherever they are written."""

from pathlib import Path

import pytest

from areal_like.core.config.keys import value_at
from areal_like.core.config.load import load
from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model
from areal_like.preflight import preflight
from areal_like.preflight.reader import read

PATHS = ["cluster.fileroot", "actor.path", "tokenizer_path", "train_dataset.path", "valid_dataset.path"]


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("key", PATHS)
def test_a_path_may_begin_with_the_home_directory(write, home, key):
    config = load(write(), [f"{key}=~/mine"]).config.model_dump()
    assert value_at(config, key) == str(home / "mine")


@pytest.mark.parametrize("name", ["owner/name", "arithmetic", "./~/data.jsonl", "~nobody-of-this-name/data"])
def test_other_names_stay_as_they_are(write, name):
    assert load(write(), [f"train_dataset.path={name}"]).config.train_dataset.path == name


def test_a_model_at_home_is_found_by_the_run_and_the_compiler(write, home):
    write_init_model(InitModelConfig(num_hidden_layers=1), home / "model", seed=0)
    assert preflight(load(write(), ["actor.path=~/model", "cluster.fileroot=~/runs"])).ok
    result = read(str(write()), ["actor.path=~/model", "cluster.fileroot=~/runs"])
    assert result.plan is not None, list(map(str, result.findings))
    assert not Path("~").exists()
