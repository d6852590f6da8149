"""A server's own copy of the weights under their Hugging Face names, to which deltas are applied.

The ranks of a server on one host map the same file of the temporary directory. Its name is removed once all have mapped
it, so that it ends with them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_like.backends.sglang.loading import addresses, load, views
from areal_like.backends.transports.deltas.files import check, read_delta, read_full, read_layout
from areal_like.core.transfer import Chain, Layout, WeightFile, locate

AT_ONCE = 1 << 28  # bytes that go to the device together


class LocalCopy:
    """The weights in the state `held` of a chain of files."""

    def __init__(self, token: str, chain: Chain) -> None:
        """Create the file that `token` names, unless another rank of the host has."""
        self.layout: Layout = _read_layout(chain.full)
        self.held: str | None = None
        self._path = Path(tempfile.gettempdir(), f"weights-{token}")
        self._bytes = sum(torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, dtype, shape in self.layout)
        self._flat: Tensor | None = None
        self._owns = self._create()

    def open(self) -> None:
        """Map the file, which a rank of this host has created."""
        if self._flat is None:
            self._flat = torch.from_file(str(self._path), shared=True, size=self._bytes, dtype=torch.uint8)

    def unlink(self) -> None:
        """Remove the file's name, once all ranks of the host have mapped it or will not."""
        self._path.unlink(missing_ok=True)

    def update(self, chain: Chain) -> None:
        """Apply the files after `held`, or all of them; the ranks that did not create the file only note it."""
        self.unlink()
        if self._owns:
            for file in chain.files_after(self.held):
                self._apply(file, is_full=file == chain.full)
        self.held = chain.state

    def has_tensors(self, chain: Chain) -> bool:
        """Return whether the files have the tensors of this copy."""
        return chain.continues(self.held) or _read_layout(chain.full) == self.layout

    def load(self, model: Any, device: torch.device) -> None:
        """Load all tensors into an SGLang model."""
        where = addresses(model)
        flat = self._get_flat()
        for start, end, layout in self._buckets():
            load(model, flat[start:end].to(device), layout, where)

    def _get_flat(self) -> Tensor:
        if self._flat is None:
            raise RuntimeError("the local copy of the weights is used before it is mapped")
        return self._flat

    def _create(self) -> bool:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        try:
            os.posix_fallocate(file, 0, self._bytes)  # a full disk is noticed here, not by a signal at a write
        finally:
            os.close(file)
        return True

    def _apply(self, file: WeightFile, *, is_full: bool) -> None:
        path = locate(file.path)
        check(path, file.sha256)
        (read_full if is_full else read_delta)(path, dict(views(self._get_flat(), self.layout)))

    def _buckets(self) -> Iterator[tuple[int, int, Layout]]:
        start, end = 0, 0
        layout: list[tuple[str, str, Sequence[int]]] = []
        for name, dtype, shape in self.layout:
            size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            if layout and end + size - start > AT_ONCE:
                yield start, end, layout
                start, layout = end, []
            end += size
            layout.append((name, dtype, shape))
        if layout:
            yield start, end, layout


def _read_layout(full: WeightFile) -> Layout:
    """Return which tensors a full copy has, after a check of its checksum."""
    check(locate(full.path), full.sha256)
    return read_layout(locate(full.path))
