"""A trainer of one rank: it has the weights of a Hugging Face directory and sends them as a real one does."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from areal_like.backends.transports.checksum import checksum
from areal_like.core.weights import make_sender


class LocalTrainer:
    def __init__(self, model: Path, device: str = "cpu", mode: str = "collective") -> None:
        self.model = model
        self._device = device
        self.saved: list[Path] = []
        self._sender = make_sender(mode, self, 0, "127.0.0.1")

    async def transfer(self, step: str, *arguments: Any, timeout_s: float) -> Any:
        return await asyncio.to_thread(getattr(self._sender, step), *arguments)

    async def checksums(self, *, timeout_s: float) -> dict[str, int]:
        return {name: int(checksum(tensor)) for name, tensor in self.weights()}

    async def transfers(self, step: str, *arguments: Any, timeout_s: float) -> list[Any]:
        return [await self.transfer(step, *arguments, timeout_s=timeout_s)]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from load_file(self.model / "model.safetensors", device=self._device).items()

    async def save_hf(self, path: Path, *, phase: str, timeout_s: float) -> None:
        shutil.copytree(self.model, path)
        self.saved.append(path)
