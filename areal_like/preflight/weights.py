"""Checks of the weights of a model directory, by the headers of its safetensors files, without reading a tensor."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from allocation.model_spec import ModelSpec
from areal_like.config.findings import ConfigError, finding

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_BESIDE = ("consolidated", "adapter")  # a copy under other names, and adapters of the model
_EMBEDDING = "embed_tokens.weight"  # of every family of model that the compiler knows


def check_weights(directory: Path, model: ModelSpec, key: str = "actor.path") -> None:
    """Check that files are whole, and that their embedding and layers agree with config.json, `model`.

    Raises ConfigError with a finding about `key`.
    """
    shapes = _read_shapes(directory, key)
    embedding = min((name for name in shapes if name.endswith(_EMBEDDING)), key=len, default=None)
    if embedding is None:
        problem = f"{directory} has no {_EMBEDDING} in its weights"
        raise _wrong(key, problem, "save the whole model there")
    found, wanted = shapes[embedding], (model.vocab_size, model.hidden_size)
    if found != wanted:
        raise _mismatch(key, directory, f"{embedding} is {_size(found)}", f"vocab_size x hidden_size = {_size(wanted)}")
    layers = _count_layers(shapes, embedding)
    if layers not in (model.layers, model.layers + model.mtp_layers):  # the latter may be saved along or not
        raise _mismatch(key, directory, f"the weights have {layers} layers", f"num_hidden_layers = {model.layers}")


def count_layers(directory: Path) -> int:
    """Return the number of layers in weights that pass `check_weights`, including layers for multi-token prediction."""
    shapes = _read_shapes(directory, "actor.path")
    return _count_layers(shapes, min((name for name in shapes if name.endswith(_EMBEDDING)), key=len))


def _count_layers(names: Collection[str], embedding: str) -> int:
    before = embedding.removesuffix(_EMBEDDING) + "layers."
    return len({name.removeprefix(before).partition(".")[0] for name in names if name.startswith(before)})


def check_tensors(
    directory: Path,
    tensors: Mapping[str, tuple[int, ...]],
    tied: Collection[str],
    ignored: Collection[str],
    key: str = "actor.path",
) -> None:
    """Check that files are whole, and that they have the `tensors` of transformers' model, by name and shape.

    A tensor whose name is `tied` may be there; one that fits a regular expression of `ignored` is left out.
    """
    shapes = _read_shapes(directory, key)
    remedy = "save the model with transformers (save_pretrained), or use a model of another family"
    if missing := sorted(tensors.keys() - shapes.keys()):
        problem = f"{directory} has no {missing[0]}{_more(missing)}, which transformers' model has"
        raise _wrong(key, problem, remedy)
    for name, wanted in tensors.items():
        if shapes[name] != wanted:
            found = f"{name} is {_size(shapes[name])}"
            raise _mismatch(key, directory, found, f"sizes that make it {_size(wanted)}")
    beyond = sorted(shapes.keys() - tensors.keys() - set(tied))
    if beyond := [name for name in beyond if not any(re.search(pattern, name) for pattern in ignored)]:
        problem = f"{directory} has {beyond[0]}{_more(beyond)}, which transformers' model does not have"
        raise _wrong(key, problem, remedy)


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} further tensors" if len(names) > 1 else ""


def layer_matrices(directory: Path) -> set[str]:
    """Return the last names of the matrices in the layers of a model directory that `check_weights` lets pass."""
    shapes = _read_shapes(directory, "actor.path").items()
    names = (name.removesuffix(".weight") for name, shape in shapes if len(shape) == 2 and ".layers." in name)
    return {name.rpartition(".")[2] for name in names}


def weight_files(directory: Path, key: str) -> list[Path]:
    """Return the files that a run loads: the files of the index, `model.safetensors`, or all but copies and adapters.

    Raises ConfigError about `key` if none exist.
    """
    index, remedy = directory / _INDEX, "save the model's weights there"
    if not index.is_file():
        if (whole := directory / _WHOLE).is_file():
            return [whole]
        if files := [file for file in sorted(directory.glob("*.safetensors")) if not file.name.startswith(_BESIDE)]:
            return files
        raise _wrong(key, f"{directory} has no weights: no *.safetensors file", remedy)
    try:
        files = sorted(directory / name for name in set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _wrong(key, f"{index} cannot be read: {error}", remedy) from error
    for file in files:
        if not file.is_file():
            raise _wrong(key, f"{directory} lacks {file.name}, which {_INDEX} names", remedy)
    return files


def _read_shapes(directory: Path, key: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor; the header of a file has to account for every byte of the file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(directory, key):
        try:
            with safe_open(file, framework="np") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            problem = f"{file} is truncated or not a safetensors file: {error}"
            raise _wrong(key, problem, "copy or download it again") from error
    return shapes


def _wrong(key: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError([finding("RUN-WEIGHTS", key, problem, remedy)])


def _mismatch(key: str, directory: Path, found: str, wanted: str) -> ConfigError:
    remedy = "keep config.json and the weights of one model together"
    return _wrong(key, f"{directory}: {found}, but config.json has {wanted}", remedy)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def is_local(path: str) -> bool:
    """Return whether a model path means a directory rather than a name on the Hugging Face hub (`owner/name`)."""
    return Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") != 1
