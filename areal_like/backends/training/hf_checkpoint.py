"""Weights under their Hugging Face names: in buckets for the servers, and as a checkpoint directory."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from areal_like.core.trainer.engine import EngineSpec

Bucket = list[tuple[str, Tensor]]
_SHARD_BYTES = 4 << 30
_EXTRA_PREDICTION = "num_nextn_predict_layers"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
# as transformers names them (VOCAB_FILES_NAMES of its tokenizers)
_TOKENIZER_FILES = ("*token*.json", "chat_template*", "vocab.*", "merges.txt", "*.model", "*.tiktoken")


def in_buckets(weights: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Group named tensors, in order, into lists of at most `limit` bytes, or of one tensor that is larger."""
    bucket: Bucket = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def save_together(path: Path, weights: Iterator[tuple[str, Tensor]], spec: EngineSpec) -> None:
    """Write the weights on rank 0; all ranks of an engine gather them together."""
    if dist.get_rank() == 0:
        dtype = spec.config.dtype
        places = {"tokenizer": spec.tokenizer, "scratch": spec.scratch}
        write_checkpoint(path, weights, spec.path, dtype, mtp=spec.trains_mtp, **places)
    for _ in weights:  # the other ranks participate
        pass
    dist.barrier()


def write_checkpoint(
    path: Path,
    weights: Iterable[tuple[str, Tensor]],
    source: Path,
    dtype: str,
    *,
    tokenizer: Path | None = None,
    scratch: Path | None = None,
    mtp: bool = False,
) -> None:
    """Write `weights` as safetensors to `path`, with the config of the checkpoint at `source`.

    `mtp` is whether the weights have the layers for multi-token prediction that the config names.

    The tokenizer's files come from the directory `tokenizer`, by default `source`. The checkpoint appears under its
    name only when it is complete; one that is there already is replaced. Until then it is in `scratch`, a directory of
    the same file system, by default beside `path`.
    """
    with complete_directory(path, scratch) as partial:
        fill_checkpoint(partial, weights, source, dtype, tokenizer=tokenizer, mtp=mtp)


def fill_checkpoint(
    partial: Path,
    weights: Iterable[tuple[str, Tensor]],
    source: Path,
    dtype: str,
    *,
    tokenizer: Path | None = None,
    mtp: bool = False,
) -> None:
    """Write the files of `write_checkpoint` into an empty directory."""
    copy_descriptions(source, tokenizer or source, partial, dtype, mtp=mtp)
    index, total = {}, 0
    for number, bucket in enumerate(in_buckets(_on_host(weights), _SHARD_BYTES), 1):
        shard = dict(bucket)
        save_tensors(shard, partial / f"{number}.safetensors")
        index.update(dict.fromkeys(shard, number))
        total += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()
        bucket.clear()  # before the next one grows
    _name_shards(partial, index, total)


@contextmanager
def complete_directory(path: Path, scratch: Path | None = None) -> Iterator[Path]:
    """Yield a directory for the body to fill, in `scratch` or beside `path`, which it becomes when it is complete."""
    partial = (scratch or path.parent) / f".{path.name}.{os.getpid()}.partial"
    partial.mkdir(parents=True)
    yield partial
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file for torch, which those may read who may read this process's files."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)  # safetensors makes it readable by its owner alone


def _on_host(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Copy tensor by tensor to the host; each is released on its device before the next is made."""
    for name, tensor in weights:
        copy = tensor.detach().cpu().contiguous()
        copy = copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy
        del tensor
        yield name, copy
        del copy


def copy_descriptions(source: Path, tokenizer: Path, target: Path, dtype: str, *, mtp: bool = False) -> None:
    """Copy a checkpoint's files other than weights, the tokenizer's from a directory that may be another one.

    The config then names the data type of the new weights, and no layers for multi-token prediction, which are gone
    without `mtp`; one that already does is copied byte for byte.
    """
    files = [file for file in source.iterdir() if not _is_tokenizers(file)]
    for file in files + [file for file in tokenizer.iterdir() if _is_tokenizers(file)]:
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and not file.name.startswith("."):
            shutil.copy(file, target)
    config = json.loads((target / "config.json").read_text())
    named = {config.pop("torch_dtype", None), config.get("dtype")} - {None}
    gone = bool(config.get(_EXTRA_PREDICTION)) and not mtp
    if named != {dtype} or gone:
        config |= {"dtype": dtype} | ({_EXTRA_PREDICTION: 0} if gone else {})
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _is_tokenizers(file: Path) -> bool:
    return any(fnmatch(file.name, pattern) for pattern in _TOKENIZER_FILES)


def _name_shards(folder: Path, index: dict[str, int], total: int) -> None:
    """Give the shards the names that transformers looks for, now that their number is known."""
    count = max(index.values())
    if count == 1:
        (folder / "1.safetensors").rename(folder / "model.safetensors")
        return
    names = {number: f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)}
    for number, name in names.items():
        (folder / f"{number}.safetensors").rename(folder / name)
    weight_map = {name: names[number] for name, number in sorted(index.items())}
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")
