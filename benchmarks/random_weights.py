"""A model's random weights, made where they are used: a host needs minutes to write and read those of 6B parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch

from areal_like.backends.megatron import engine
from areal_like.backends.megatron.bridges import make_bridge
from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import model_config


def write_config(shape: InitModelConfig, folder: Path, dtype: str) -> Path:
    """Write config.json alone."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(shape, dtype)))
    return folder


@contextmanager
def random_weights() -> Iterator[None]:
    """Have Megatron engines fill their weights instead of reading a checkpoint, replicas alike."""

    def make(*arguments: Any) -> Any:
        bridge = make_bridge(*arguments)
        bridge.load = lambda models, _: [fill(model) for model in models]
        return bridge

    with patch.object(engine, "make_bridge", make):
        yield


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Fill matrices with normal values of deviation 0.02, seeded by their names, and norms with ones."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(not name.endswith("bias"))
            continue
        generator = torch.Generator(parameter.device).manual_seed(crc32(name.encode()))
        parameter.normal_(0, 0.02, generator=generator)
