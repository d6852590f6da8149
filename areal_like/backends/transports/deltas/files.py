"""Files of weights for servers (`weight_update.full_every`): full copies, and lossless deltas to the version before.

Both are safetensors files. A full copy has the tensors. A delta has a tensor of bytes, `NAME@START`, for each piece
of a tensor with changed words: the distances between these words, and the XOR of their old and new bits, compressed.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from areal_like.core.transfer import Layout

PIECE = 1 << 22  # words that are compared at once, which bounds the memory for it
LEVEL = 1  # of zlib; higher ones are much slower, and a few percent smaller
GAP_BYTES = 4
LAYOUT = "layout"  # key of the metadata of a full copy


def differences(before: Tensor, after: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the first word and the encoded changes of each piece of a CPU tensor that has any."""
    old, new = _words(before), _words(after)
    for start in range(0, len(new), PIECE):
        changed = old[start : start + PIECE] ^ new[start : start + PIECE]
        places = np.flatnonzero(changed)
        if len(places):
            gaps = np.diff(places, prepend=0).astype(np.uint32)
            packed = zlib.compress(_planes(gaps) + _planes(changed[places]), LEVEL)
            yield start, torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def change(tensor: Tensor, start: int, encoded: Tensor) -> None:
    """Apply the changes of one piece to a CPU tensor in place."""
    words = _words(tensor)
    packed = zlib.decompress(encoded.numpy())
    count = len(packed) // (GAP_BYTES + words.itemsize)
    gaps = _join_planes(packed[: count * GAP_BYTES], np.dtype(np.uint32))
    words[start + np.cumsum(gaps, dtype=np.int64)] ^= _join_planes(packed[count * GAP_BYTES :], words.dtype)


def write_full(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a full copy and return its SHA-256."""
    # the widest first: tensors that lie one after the other are then aligned
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    layout = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in ordered]
    return _write(path, tensors, {LAYOUT: json.dumps(layout), "format": "pt"})


def write_delta(path: Path, pieces: Mapping[tuple[str, int], Tensor]) -> str:
    """Write the pieces of a delta, by tensor and first word, and return the file's SHA-256."""
    # with empty metadata and no piece, safetensors 0.8 writes a header that it does not read
    return _write(path, {f"{name}@{start}": piece for (name, start), piece in pieces.items()}, None)


def read_layout(path: Path) -> Layout:
    """Return the tensors of a full copy, in an order that aligns each of them."""
    with safe_open(path, "pt") as file:
        return [(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(file.metadata()[LAYOUT])]


def read_full(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy a full copy into CPU tensors."""
    with safe_open(path, "pt") as file:
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(name))


def read_delta(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Apply a delta to CPU tensors that have the version before."""
    with safe_open(path, "pt") as file:
        for key in list(file.keys()):  # the file itself is not iterable
            name, _, start = key.rpartition("@")
            change(tensors[name], int(start), file.get_tensor(key))


def check(path: Path, expected: str) -> None:
    """Raise ValueError if a file is not there or not the one that the trainer wrote."""
    advice = (
        "With `weight_update.mode=disk` every server reads the files below `cluster.fileroot` as the trainer wrote them: "
        "check that file system, or write weight_update.mode=collective, which uses no files"
    )
    try:
        found = _sha256(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist on this host. {advice}") from None
    if found != expected:
        raise ValueError(f"{path} is corrupt: its SHA-256 differs from the trainer's. {advice}")


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> str:
    partial = path.with_name(f"{path.name}.partial")
    save_file(dict(tensors), partial, metadata)
    found = _sha256(partial)
    os.replace(partial, path)
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _words(tensor: Tensor) -> NDArray[np.unsignedinteger]:
    """Return the bits of a contiguous CPU tensor as integers of its item size; they share its memory."""
    return tensor.view(-1).view(torch.uint8).numpy().view(f"u{min(tensor.itemsize, 8)}")


def _planes(words: NDArray[np.unsignedinteger]) -> bytes:
    """Return the first byte of every word, then the second: bytes of one kind compress well."""
    return words.view(np.uint8).reshape(-1, words.itemsize).T.tobytes()


def _join_planes(planes: bytes, dtype: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return the words of `_planes`."""
    each = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(each.T).view(dtype).reshape(-1)
