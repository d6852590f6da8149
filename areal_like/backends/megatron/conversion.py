"""Converts between Hugging Face and Megatron checkpoints in one CPU process, with every tensor accounted for."""

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import Tensor

from allocation.plan import ParallelSizes
from areal_like.backends.megatron.bridges.proven import MTP
from areal_like.backends.megatron.bridges.support import BRIDGES
from areal_like.backends.megatron.cpu import cuda as cpu
from areal_like.backends.megatron.distributed import DESCRIPTIONS, TENSORS, read_weights
from areal_like.backends.megatron.options import transformer_options
from areal_like.backends.training.hf_checkpoint import copy_descriptions, fill_checkpoint
from areal_like.core.config.schema import EngineConfig
from areal_like.core.errors import CheckpointError
from areal_like.core.trainer.engine import Rendezvous
from areal_like.runtime.ports import listen

cpu.install()  # before anything imports megatron.core
# isort: split

from areal_like.backends.megatron import parallel  # noqa: E402
from areal_like.backends.megatron.bridges import ModelSource, open_bridge  # noqa: E402
from areal_like.backends.megatron.dist_weights import list_first, load_weights, save_weights  # noqa: E402
from areal_like.backends.training.value_head import HEAD_NAME  # noqa: E402

_ONE, _LOOPBACK = ParallelSizes(), "127.0.0.1"
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"  # of Megatron
_HF_EMBEDDING, _HF_OUTPUT = "embed_tokens.weight", "lm_head.weight"  # the first after the names of its modules
_COMPUTED = "*.rotary_emb.inv_freq"  # in old checkpoints; transformers computes it from the config
_COPIED = "it is the embedding"
_MTP = "mtp."
_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HELD = ("float32", "bfloat16")
# Errors of transformers, the bridges and Megatron for an unusable config
_UNFIT = (AssertionError, AttributeError, KeyError, TypeError, ValueError, StrictDataclassError)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Make this process a Megatron world of one rank in the body, and silence libraries."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    listener = listen(_LOOPBACK)
    rendezvous = Rendezvous(0, 1, _LOOPBACK, listener.getsockname()[1], listener=listener)
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), listener:
        with cpu.cpu_as_cuda():
            parallel.initialize(rendezvous, _ONE, torch.device("cpu"), seed=0)
        try:
            yield
        finally:
            parallel.shutdown()


def to_megatron(
    bridge: str, path: Path, files: Sequence[Path], target: Path | None, dtype: str | None, leave_out: Sequence[str]
) -> str:
    """Write the Hugging Face checkpoint `path` as a Megatron one into the empty directory `target`, if there is one.

    The weights have `dtype`, by default the checkpoint's; tensors whose names match `leave_out` are not converted.
    Returns a summary. Raises CheckpointError with the names of tensors that would be lost.
    """
    given, config = _headers(files), json.loads((path / "config.json").read_text())
    left, tensors = _drop(given, config, leave_out)
    held = dtype or ("bfloat16" if given.dtypes.get(_embedding_of(given.files)) == "BF16" else "float32")
    model = _Model(bridge, path, held, value_head=HEAD_NAME in tensors.files)
    model.read(path, tensors)
    if target is not None:
        model.write(target)
        model.reread(target)
    model.compare(tensors)
    if target is not None:
        kept = {name: kind for name, kind in given.dtypes.items() if left.get(name, _COPIED) == _COPIED}
        (target / TENSORS).write_text(json.dumps(kept, indent=1) + "\n")
        (target / DESCRIPTIONS).mkdir()
        copy_descriptions(path, path, target / DESCRIPTIONS, _dtype_of(config) or held)
    done = "would come back" if target is None else "written, read again and found"
    lines = [f"{len(tensors.files)} tensors, each mapped once by {bridge}, {done} equal bit for bit"]
    return "\n".join([*lines, *(f"left out: {name} ({why})" for name, why in left.items())])


def to_hugging_face(bridge: str, path: Path, config_path: Path, tokenizer: Path, target: Path | None) -> str:
    """Write the Megatron checkpoint `path` in Hugging Face form into the empty directory `target`, if there is one.

    Config and tokenizer come from `config_path` and `tokenizer`. Returns a summary. Raises CheckpointError.
    """
    stored = read_weights(path).tensors
    if _EMBEDDING not in stored:
        raise CheckpointError(f"{path} has no {_EMBEDDING}: it is not a whole language model")
    held = stored[_EMBEDDING].dtype if stored[_EMBEDDING].dtype in _HELD else "float32"
    value_head = _OUTPUT in stored and stored[_OUTPUT].shape[0] == 1
    config = json.loads((config_path / "config.json").read_text())
    can = bridge == BRIDGES[1] and config["model_type"] in MTP and config.get("num_nextn_predict_layers") == 1
    mtp = can and any(name.startswith(_MTP) for name in stored)
    model = _Model(bridge, config_path, held, value_head=value_head, mtp=mtp)
    model.reread(path)
    record = json.loads((path / TENSORS).read_text()) if (path / TENSORS).is_file() else None
    names = set()

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _restore(model.export(), record):
            if name in names:
                raise CheckpointError(f"{bridge} gives {name} twice")
            names.add(name)
            yield name, tensor

    if target is None:
        for _ in weights():
            pass
    else:
        dtype = (_dtype_of(config) if record else None) or held
        fill_checkpoint(target, weights(), config_path, dtype, tokenizer=tokenizer, mtp=mtp)
    return f"{len(names)} tensors from {len(stored)} of Megatron's, each mapped once by {bridge}"


@dataclass(frozen=True)
class _Tensors:
    """Content of a Hugging Face checkpoint: the file, data type and shape of each tensor by name."""

    files: Mapping[str, Path]
    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
            return tensor


class _Model:
    """A whole model in this process that is not executed; `dtype` is its weights' type, `path` has its config.json.

    Raises CheckpointError if the bridge cannot build it.
    """

    def __init__(self, bridge: str, path: Path, dtype: str, *, value_head: bool, mtp: bool = False) -> None:
        options = transformer_options(EngineConfig(), device="cpu", pipelined=False, interleaved=False)
        source = ModelSource(path, getattr(torch, dtype), _ONE, options, value_head=value_head, mtp=mtp)
        with cpu.cpu_as_cuda():
            try:
                self._bridge = open_bridge(bridge, source)
                self._models = self._bridge.build()
            except _UNFIT as error:
                raise CheckpointError(f"{bridge} cannot build the model of {path}/config.json: {error}") from error
        self._vocab_size = source.config.for_bridge.vocab_size

    def read(self, path: Path, tensors: _Tensors) -> None:
        """Load the weights of a Hugging Face checkpoint. Raises CheckpointError with the names that do not fit."""
        _check_names(tensors.shapes, ((name, tuple(tensor.shape)) for name, tensor in self.export()))
        self._forget()
        with cpu.cpu_as_cuda():
            self._bridge.load(self._models, path)
        if empty := [name for name, tensor in self._floats() if tensor.isnan().all()]:
            raise CheckpointError(f"{path} has no tensors for Megatron's {list_first(empty)}")

    def write(self, path: Path) -> None:
        """Write a Megatron checkpoint. Raises OSError."""
        with cpu.cpu_as_cuda():
            save_weights(path, self._models)

    def reread(self, path: Path) -> None:
        """Load the weights of a Megatron checkpoint in any layout. Raises CheckpointError."""
        self._forget()
        with cpu.cpu_as_cuda():
            load_weights(path, self._models, self._vocab_size)

    def compare(self, tensors: _Tensors) -> None:
        """Raise CheckpointError with the names of tensors that the model does not return unchanged."""
        changed = [name for name, tensor in self.export() if not _same(tensor, tensors.read(name))]
        if changed:
            raise CheckpointError(
                f"{list_first(sorted(changed))} would be rounded: the checkpoint has several data types; "
                "write --dtype float32, which holds them all"
            )

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its Hugging Face name."""
        with cpu.cpu_as_cuda(), torch.no_grad():
            yield from self._bridge.export(self._models)

    def _forget(self) -> None:
        """Overwrite the weights, so that a tensor that is not read is noticed."""
        for _, tensor in self._floats():
            tensor.fill_(torch.nan)

    def _floats(self) -> Iterator[tuple[str, Tensor]]:
        for model in self._models:
            for name, value in model.state_dict().items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    yield name, value


def _headers(files: Iterable[Path]) -> _Tensors:
    """Return the tensors of complete safetensors files."""
    found: dict[str, Path] = {}
    dtypes, shapes = {}, {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                entry = tensors.get_slice(name)
                found[name], dtypes[name], shapes[name] = file, entry.get_dtype(), tuple(entry.get_shape())
    return _Tensors(found, dtypes, shapes)


def _drop(given: _Tensors, config: Mapping[str, Any], patterns: Sequence[str]) -> tuple[dict[str, str], _Tensors]:
    """Return the reasons for omitted tensors by name, and all other tensors."""
    left = {name: "as asked" for name in given.files if any(fnmatch(name, pattern) for pattern in patterns)}
    left |= {name: "the config gives it" for name in given.files if fnmatch(name, _COMPUTED)}
    embedding = _embedding_of(given.files)
    tied = config.get("tie_word_embeddings") and {_HF_OUTPUT, embedding} <= given.files.keys()
    if tied and torch.equal(given.read(_HF_OUTPUT), given.read(embedding)):
        left.setdefault(_HF_OUTPUT, _COPIED)
    shapes = {name: shape for name, shape in given.shapes.items() if name not in left}
    return left, _Tensors({name: given.files[name] for name in shapes}, given.dtypes, shapes)


def _embedding_of(names: Iterable[str]) -> str:
    """Return the name of the embedding in Hugging Face form, "" without one."""
    return next((name for name in names if name.endswith(_HF_EMBEDDING)), "")


def _check_names(source: Mapping[str, tuple[int, ...]], held: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Check that source and model have the same tensors with the same shapes."""
    places: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in held:
        places.setdefault(name, []).append(shape)
    problems = {
        "without a place in the model": source.keys() - places.keys(),
        "in the model but not in the checkpoint": places.keys() - source.keys(),
        "with several places in the model": {name for name, shapes in places.items() if len(shapes) > 1},
        "with another shape in the model": {n for n, shapes in places.items() if source.get(n, shapes[0]) != shapes[0]},
    }
    if found := [f"{what}: {list_first(sorted(names))}" for what, names in problems.items() if names]:
        raise CheckpointError("not every tensor can be mapped once; " + "; ".join(found))


def _same(held: Tensor, stored: Tensor) -> bool:
    """Return whether the stored tensor is equal bit for bit."""
    out = held.to(stored.dtype).contiguous()
    return torch.equal(out.view(torch.uint8), stored.contiguous().view(torch.uint8))


def _restore(weights: Iterable[tuple[str, Tensor]], record: Mapping[str, str] | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in the data types of `record`, and a tied head that was stored beside the embedding."""
    missing = dict(record or {})
    for name, tensor in weights:
        kind = missing.pop(name, None)
        if record is not None and kind is None:
            raise CheckpointError(f"{TENSORS} does not name {name}, which is in the checkpoint")
        yield name, tensor.to(_TYPES[kind]) if kind in _TYPES else tensor
        if name.endswith(_HF_EMBEDDING) and record is not None and _HF_OUTPUT in record:
            embedding = tensor
    if kind := missing.pop(_HF_OUTPUT, None):
        yield _HF_OUTPUT, embedding.to(_TYPES[kind]).clone()
    if missing:
        raise CheckpointError(f"{TENSORS} names what is not in the checkpoint: {list_first(sorted(missing))}")


def _dtype_of(config: Mapping[str, Any]) -> str | None:
    """Return the data type that a config.json names."""
    named = config.get("dtype", config.get("torch_dtype"))
    return None if named is None else str(named)
