"""The trainer's ranks and the checks before a start, for tests of whole models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "trainer"))


@pytest.fixture(scope="module")
def ranks() -> Iterator:
    """Rank processes, as many as a test asks for."""
    from trainer_ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory):
    """The checks before a start, of any model."""
    from model_checks import ModelChecks

    return ModelChecks(tmp_path_factory.mktemp("checks"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """A directory with a small model, by variant."""
    from tiny_models import VARIANTS, write_tiny

    @cache
    def make(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        write_tiny(VARIANTS[name], path)
        return path

    return make


@pytest.fixture(scope="module")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory):
    """A directory with a small model of text and images, by family."""
    from tiny_vlms import write_vlm

    @cache
    def make(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        write_vlm(family, path)
        return path

    return make
