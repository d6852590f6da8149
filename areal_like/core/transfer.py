"""Files of weights as controller and servers name them: a full copy, and lossless deltas after it. Imports no torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ONLY_ADAPTER = "policy"  # name of the adapter of a run with one
EXPORT_LAYOUT = "tensors"  # key of the layout of an exported bucket

type Layout = Sequence[tuple[str, str, Sequence[int]]]
"""Name, dtype and shape of each tensor of a bucket."""

FOLDER = "downloads"  # of a server's temporary directory


class WeightFile(NamedTuple):
    """A file of weights; `path` is absolute, or only a name if the server has downloaded the file."""

    path: str
    sha256: str
    size: int

    def with_name(self) -> WeightFile:
        """Return the file with the name instead of the path."""
        return self._replace(path=Path(self.path).name)


@dataclass(frozen=True)
class FileSource:
    """A URL below which servers download files of weights, and the bearer token for it."""

    url: str
    token: str | None


@dataclass(frozen=True)
class Chain:
    """The last full copy and each delta after it.

    A server that holds the version before the full copy, the state `before`, needs the delta `bridge` instead of it.
    A state is named by the path of the last file of the chain at that time.
    """

    files: Sequence[WeightFile]
    before: str | None = None
    bridge: WeightFile | None = None

    @property
    def state(self) -> str:
        """The state of a server that has applied all files."""
        return self.files[-1].path

    @property
    def full(self) -> WeightFile:
        """The full copy."""
        return self.files[0]

    @property
    def paths(self) -> list[str]:
        """Paths of all files."""
        return [file.path for file in (*self.files, *([self.bridge] if self.bridge else []))]

    def with_names(self) -> Chain:
        """Return the chain as servers name files that they download."""
        files = [file.with_name() for file in self.files]
        before = None if self.before is None else Path(self.before).name
        return Chain(files, before, self.bridge and self.bridge.with_name())

    def continues(self, state: str | None) -> bool:
        """Return whether a server in this state needs no full copy."""
        return state is not None and (state == self.before or state in [file.path for file in self.files])

    def files_after(self, state: str | None) -> Sequence[WeightFile]:
        """Return the files that a server in this state lacks; None is a server without any."""
        if state is not None and state == self.before and self.bridge:
            return [self.bridge, *self.files[1:]]
        paths = [file.path for file in self.files]
        return self.files[paths.index(state) + 1 :] if state in paths else self.files

    def to_json(self, token: str) -> str:
        """Return the request to load the files; `token` names the server's new copy of the weights."""
        return json.dumps({"token": token, "files": self.files, "before": self.before, "bridge": self.bridge})

    @classmethod
    def from_json(cls, text: str) -> tuple[str, Chain]:
        """Return the token and the chain of a request."""
        sent = json.loads(text)
        bridge = WeightFile(*sent["bridge"]) if sent["bridge"] else None
        return sent["token"], cls([WeightFile(*file) for file in sent["files"]], sent["before"], bridge)


def locate(path: str) -> Path:
    """Return where this server has a file: an absolute path unchanged, a name among the downloads."""
    return Path(tempfile.gettempdir(), FOLDER, path)
