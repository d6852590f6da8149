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

from areal_like.rollout.sglang import Layout
from areal_like.rollout.sglang.deltas import check, read_delta, read_full, read_layout
from areal_like.rollout.sglang.loading import addresses, load, views

AT_ONCE = 1 << 28  # bytes that go to the device together

type Files = Sequence[tuple[str, str]]
"""Path and SHA-256 of the last full copy and of each delta after it."""


class LocalCopy:
    """The weights after the last of the files that were applied, `held`."""

    def __init__(self, token: str, files: Files) -> None:
        """Create the file that `token` names, unless another rank of the host has."""
        check(Path(files[0][0]), files[0][1])
        self.layout: Layout = read_layout(Path(files[0][0]))
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

    def update(self, files: Files) -> None:
        """Apply the files after `held`, or all of them; the ranks that did not create the file only note it."""
        self.unlink()
        names = [path for path, _ in files]
        following = files[names.index(self.held) + 1 :] if self.held in names else files
        if self._owns:
            for path, sha256 in following:
                self._apply(Path(path), sha256, is_full=path == names[0])
        self.held = names[-1]

    def has_tensors(self, files: Files) -> bool:
        """Return whether the files have the tensors of this copy."""
        if self.held in [path for path, _ in files]:
            return True
        check(Path(files[0][0]), files[0][1])
        return read_layout(Path(files[0][0])) == self.layout

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

    def _apply(self, path: Path, sha256: str, *, is_full: bool) -> None:
        check(path, sha256)
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
