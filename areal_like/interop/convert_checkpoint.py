"""`areal-like convert-checkpoint`: from Hugging Face to Megatron's distributed checkpoint, and back.

This module does the part without torch: it finds the source and checks that it is complete.
`trainer/megatron/conversion.py` converts.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from safetensors import SafetensorError

from allocation.model_spec import ModelError, load_model
from areal_like.backends.megatron.bridges.language_part import LANGUAGE_FAMILIES, language_part
from areal_like.backends.megatron.bridges.support import BRIDGES, converting_bridges
from areal_like.backends.megatron.distributed import CONFIG, DESCRIPTIONS, read_weights
from areal_like.core.checkpoint.journal import read_header
from areal_like.core.checkpoint.store import DIRECTORY, JOURNAL, newest, read
from areal_like.core.config.findings import ConfigError
from areal_like.core.config.load import load
from areal_like.core.errors import CheckpointError
from areal_like.preflight.machine import CONFIG_FILE
from areal_like.preflight.model import find_spec
from areal_like.preflight.weights import weight_files


def convert(
    source: Path,
    target: Path | None,
    *,
    model: Path | None = None,
    bridge: str | None = None,
    dtype: str | None = None,
    leave_out: Sequence[str] = (),
) -> str:
    """Convert `source` to the other format at `target`, which appears when it is complete; with None, only audit.

    A source is a directory: in Hugging Face format, a Megatron distributed checkpoint, a run or one of its checkpoints
    (`recover/step-N`, or a role's in it). `model` is the directory with config and tokenizer of a Megatron checkpoint,
    if the checkpoint lacks them. Returns a summary. Raises CheckpointError, and then leaves no files. Run it in a
    separate process, because it hides the GPUs.
    """
    check_target(target)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # one process on the CPU; torch reads it on import
    if (source / "config.json").is_file():
        files, chosen = _weight_files(source), _bridge(source, bridge)
        with appearing(target) as partial, _megatron() as megatron:
            return megatron.to_megatron(chosen, source, files, partial, dtype, leave_out)
    if dtype or leave_out:
        raise CheckpointError(f"{source} has no config.json; --dtype and --leave-out need a Hugging Face checkpoint")
    found = _find(source, model)
    if found.by_fsdp:
        from areal_like.backends.fsdp.conversion import to_hugging_face

        with appearing(target) as partial:
            return to_hugging_face(found.path, found.config, found.tokenizer, found.by_fsdp, partial)
    read_weights(found.path)
    chosen = _bridge(found.config, bridge)
    with appearing(target) as partial, _megatron() as megatron:
        return megatron.to_hugging_face(chosen, found.path, found.config, found.tokenizer, partial)


@dataclass(frozen=True)
class _Source:
    """The location of a trainer's weights, config and tokenizer; for FSDP, also the data type that a run writes."""

    path: Path
    config: Path
    tokenizer: Path
    by_fsdp: str | None = None


@contextmanager
def _megatron() -> Iterator[ModuleType]:
    from areal_like.backends.megatron import conversion

    with conversion.alone():
        yield conversion


def check_target(target: Path | None) -> None:
    """Raise CheckpointError for a target that exists or has no parent."""
    if target is not None and target.exists():
        raise CheckpointError(f"{target} already exists; choose a new directory")
    if target is not None and not target.absolute().parent.is_dir():
        raise CheckpointError(f"{target} cannot be created: missing directory {target.absolute().parent}")


def _weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a Hugging Face checkpoint, after checking that they fit its config."""
    try:
        _, findings = find_spec(str(path.absolute()), "SOURCE")
        if findings:
            raise ConfigError(findings)
        return weight_files(path, "SOURCE")
    except ConfigError as error:
        raise CheckpointError("\n".join(found.message for found in error.findings)) from error


def _bridge(path: Path, wanted: str | None) -> str:
    """Return the requested bridge, or the first that supports the model of this config."""
    try:
        load_model(path / "config.json")
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    config = json.loads((path / "config.json").read_text())
    family, fitting = config["model_type"], converting_bridges(language_part(config))
    if family in LANGUAGE_FAMILIES:  # the tower is written beside the language model of this bridge
        fitting = [name for name in fitting if name == "megatron-bridge"]
    if not fitting:
        raise CheckpointError(f"neither bridge supports the model family {family} ({' and '.join(BRIDGES)})")
    if wanted is not None and wanted not in fitting:
        raise CheckpointError(f"{wanted} does not support the model family {family}; use --bridge {fitting[0]}")
    return wanted or fitting[0]


def _find(source: Path, model: Path | None) -> _Source:
    """Return the source of a trainer's checkpoint. Raises CheckpointError."""
    path, run = _of_run(source)
    own = model or path / DESCRIPTIONS
    if (path / CONFIG).is_file() and (model or (own / "config.json").is_file()):
        return _Source(path, own, own)
    help = "set --model DIRECTORY to the model's directory, with config.json and tokenizer"
    if run is None:
        if (path / CONFIG).is_file():
            raise CheckpointError(f"{path} does not name its model; {help}")
        raise CheckpointError(
            f"{path} is not a complete checkpoint: it has neither config.json (Hugging Face) nor {CONFIG} (Megatron's last), "
            f"nor {CONFIG_FILE} and {DIRECTORY} (a run)"
        )
    try:
        config = load(run / CONFIG_FILE).config
    except (ConfigError, OSError) as error:
        raise CheckpointError(f"{run / CONFIG_FILE} cannot be read: {error}; {help}") from error
    section = next((section for role, section in config.roles.items() if role == path.name), config.actor)
    named = section.path or config.actor.path
    directory = model or (run / "initial_model" if named is None else Path(named))
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}, the model of the run, is not a directory with a config.json; {help}")
    tokenizer = Path(config.tokenizer_path or directory) if model is None else model
    by_fsdp = None if (path / CONFIG).is_file() else section.dtype
    return _Source(path, directory, tokenizer if tokenizer.is_dir() else directory, by_fsdp)


def _of_run(source: Path) -> tuple[Path, Path | None]:
    """Return the Megatron checkpoint and its run: by default the newest checkpoint, and the actor's."""
    if (source / CONFIG_FILE).is_file() and (source / DIRECTORY).is_dir():
        found, complaints = newest(source / DIRECTORY)
        if found is None:
            raise CheckpointError("; ".join([f"{source} has no complete checkpoint", *complaints]))
        return found.path / "actor", source
    here = source.absolute()
    step = here if here.name.startswith("step-") else here.parent
    if not (step.name.startswith("step-") and (step.parent / JOURNAL).is_file()):
        return source, None
    read(step, read_header(step.parent / JOURNAL)["run"])
    return source / "actor" if step == here else source, step.parent.parent


@contextmanager
def appearing(target: Path | None) -> Iterator[Path | None]:
    """Yield a directory that is renamed to `target` when the body succeeds, and removed when it fails."""
    if target is None:
        yield None
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        yield partial
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
