"""The weights of a model directory, as far as the headers of its safetensors files tell without reading a tensor."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from allocation.model_spec import ModelSpec
from allocation.parameters import total_parameters
from areal_like.config.findings import ConfigError, finding

_INDEX = "model.safetensors.index.json"
_EMBEDDING = "embed_tokens.weight"  # of every family of model that the compiler knows


def check_weights(directory: Path, model: ModelSpec, key: str = "actor.path") -> None:
    """Check that files are whole, and that their embedding and layers are those of config.json, `model`.

    Raises ConfigError with a finding about `key`.
    """
    shapes = _read_shapes(directory, key)
    embedding = min((name for name in shapes if name.endswith(_EMBEDDING)), key=len, default=None)
    if embedding is None:
        problem = f"{directory} has no {_EMBEDDING} in its weights"
        raise _wrong(key, "RUN-WEIGHTS-EMBEDDING", problem, "save the whole model there")
    found, wanted = shapes[embedding], (model.vocab_size, model.hidden_size)
    if found != wanted:
        raise _mismatch(key, directory, f"{embedding} is {_size(found)}", f"vocab_size x hidden_size = {_size(wanted)}")
    before = embedding.removesuffix(_EMBEDDING) + "layers."
    layers = {name.removeprefix(before).partition(".")[0] for name in shapes if name.startswith(before)}
    if len(layers) not in (model.layers, model.layers + model.mtp_layers):  # the latter may be saved along or not
        raise _mismatch(key, directory, f"the weights have {len(layers)} layers", f"num_hidden_layers = {model.layers}")
    if not model.known_family:
        _check_count(key, directory, shapes, model)


def _check_count(key: str, directory: Path, shapes: Mapping[str, tuple[int, ...]], model: ModelSpec) -> None:
    """Raise ConfigError where the weights are not those of the layers that an unknown family is taken to have."""
    tied_head = model.vocab_size * model.hidden_size if model.tied_embeddings else 0  # which may be saved along or not
    found, wanted = sum(map(math.prod, shapes.values())), total_parameters(model)
    if found not in (wanted, wanted + tied_head):
        problem = f"{directory} has {found:,} parameters; a dense model of its sizes has {wanted:,}"
        remedy = f"use a model of a known family; {model.family} has other layers than those that can be counted"
        raise _wrong(key, "RUN-WEIGHTS-FAMILY", problem, remedy)


def layer_matrices(directory: Path) -> set[str]:
    """The last names of the matrices in the layers of a model directory that `check_weights` lets pass."""
    shapes = _read_shapes(directory, "actor.path").items()
    names = (name.removesuffix(".weight") for name, shape in shapes if len(shape) == 2 and ".layers." in name)
    return {name.rpartition(".")[2] for name in names}


def weight_files(directory: Path, key: str) -> list[Path]:
    """Return the weight files of the index, or all files without one; raise ConfigError about `key` if none exist."""
    index, remedy = directory / _INDEX, "save the model's weights there"
    if not index.is_file():
        if files := sorted(directory.glob("*.safetensors")):
            return files
        raise _wrong(key, "RUN-WEIGHTS-MISSING", f"{directory} has no weights: no *.safetensors file", remedy)
    try:
        files = sorted(directory / name for name in set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _wrong(key, "RUN-WEIGHTS-INDEX", f"{index} cannot be read: {error}", remedy) from error
    for file in files:
        if not file.is_file():
            raise _wrong(key, "RUN-WEIGHTS-MISSING", f"{directory} lacks {file.name}, which {_INDEX} names", remedy)
    return files


def _read_shapes(directory: Path, key: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor; the header of a file has to account for every byte of the file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(directory, key):
        try:
            with safe_open(file, framework="np") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            problem = f"{file} is torn, or not a safetensors file: {error}"
            raise _wrong(key, "RUN-WEIGHTS-TORN", problem, "copy or download it again") from error
    return shapes


def _wrong(key: str, code: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError([finding(code, key, problem, remedy)])


def _mismatch(key: str, directory: Path, found: str, wanted: str) -> ConfigError:
    remedy = "keep config.json and the weights of one model together"
    return _wrong(key, "RUN-WEIGHTS-MISMATCH", f"{directory}: {found}, but config.json has {wanted}", remedy)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def is_local(path: str) -> bool:
    """Return whether a model path means a directory rather than a name on the Hugging Face hub (`owner/name`)."""
    return Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") != 1
