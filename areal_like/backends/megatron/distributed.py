"""Contents of a Megatron distributed checkpoint, read from its `.metadata` without torch or unpickling.

The file is a pickle of `torch.distributed.checkpoint.metadata.Metadata` (torch 2.13) that names every tensor and the
location of each of its pieces in the `.distcp` files. Megatron (megatron-core 0.19, `dist_checkpointing/core.py`)
writes `metadata.json` last.
"""

import json
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.core.errors import CheckpointError

CONFIG, METADATA = "metadata.json", ".metadata"
# Additional files of a converted checkpoint: the model's config and tokenizer, and the types of its Hugging Face
# tensors
DESCRIPTIONS, TENSORS = "huggingface", "tensors.json"
_RECORDS = {
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        )
    ),
}
_TORN = (OSError, ValueError, TypeError, AttributeError, IndexError, EOFError, pickle.UnpicklingError)
_WEIGHTS = ("embedding.", "decoder.", "output_layer.", "mtp.", "visual.")
_WRAPPED, _ADAPTERS = "module.", "lora."


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: its full shape and the name of its data type."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Weights:
    """The model's tensors by Megatron's names, which start with `prefix` in a trainer's checkpoint."""

    prefix: str
    tensors: dict[str, Stored]


def read_weights(path: Path) -> Weights:
    """Return the model's tensors in the checkpoint directory `path`, without the optimizer's.

    Raises CheckpointError if it is not a Megatron checkpoint, or if a file is missing or truncated.
    """
    if not (path / CONFIG).is_file():
        there = f"it has no {CONFIG}, which is written last" if path.is_dir() else "the directory does not exist"
        raise CheckpointError(f"{path} is not a whole Megatron distributed checkpoint: {there}")
    try:
        backend = json.loads((path / CONFIG).read_text()).get("sharded_backend")
        metadata = _describe(path)
        found = {name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")}
        tensors = {name: Stored(tuple(entry.size), str(entry.properties.dtype)) for name, entry in found.items()}
        pieces = [(str(piece.relative_path), piece.offset + piece.length) for piece in metadata.storage_data.values()]
    except _TORN as error:
        raise CheckpointError(f"{path} is not a Megatron distributed checkpoint, or is damaged: {error}") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{path} is in Megatron's format {backend!r}; only torch_dist is read")
    _check_files(path, pieces)
    for prefix in ("", _WRAPPED):
        whole = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if weights := {name: tensor for name, tensor in whole.items() if name.startswith(_WEIGHTS)}:
            return Weights(prefix, weights)
    if any(name.startswith(_ADAPTERS) for name in tensors):
        raise CheckpointError(
            f"{path} contains only adapters (use_lora); use a checkpoint that saver wrote in that run"
        )
    raise CheckpointError(f"{path} has no weights of a language model under Megatron's names")


def check_description(path: Path) -> None:
    """Raise CheckpointError unless torch may unpickle the `.metadata` of the checkpoint directory `path`."""
    try:
        _describe(path)
    except _TORN as error:
        raise CheckpointError(f"{path} is not a torch checkpoint, or is damaged: {error}") from error


def _describe(path: Path) -> Any:
    with (path / METADATA).open("rb") as file:
        return _Reader(file).load()


def _check_files(path: Path, pieces: Iterable[tuple[str, int]]) -> None:
    """Check that every file reaches the end of its last piece; `pieces` are names with ends, in bytes."""
    for name, end in dict(sorted(pieces)).items():
        there = (path / name).stat().st_size if (path / name).is_file() else None
        if there is None or there < end:
            what = "is missing" if there is None else f"has {there} bytes of {end}"
            raise CheckpointError(f"{path} is not whole: {name} {what}")


class _Record:
    """A stand-in for a torch object, with its pickled fields."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"dtype": state[0]})  # TensorProperties are a tuple


class _Reader(pickle.Unpickler):
    """Creates records of torch's checkpoint classes and names of other torch objects, and rejects everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and "." not in name:
            return name
        if (module, name) in _RECORDS:
            return _Record
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if (module, name) in (("collections", "OrderedDict"), ("pathlib", "PosixPath")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{METADATA} holds {module}.{name}")
