"""The readers of files that this project declares, whether or not the installation already knows them."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from allocation import readers

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def declared(*, group):
    points = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][group]
    return [EntryPoint(name, value, group) for name, value in points.items()]


@pytest.fixture(autouse=True)
def declared_readers(monkeypatch):
    monkeypatch.setattr(readers, "entry_points", declared)
