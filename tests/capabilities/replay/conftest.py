"""The trainer's ranks, for tests of digests of their state."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "trainer"))


@pytest.fixture(scope="module")
def ranks() -> Iterator:
    """Rank processes, as many as a test asks for."""
    from trainer_ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    from areal_like.core.config.schema import InitModelConfig
    from areal_like.demo.init_model import write_init_model

    path = tmp_path_factory.mktemp("model")
    shape = InitModelConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256)
    write_init_model(shape, path, seed=0)
    return path
