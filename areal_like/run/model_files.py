"""Finds, creates or downloads a run's model in Hugging Face form.

The hub's client is a process of its own, `python -m areal_like.run.model_files OWNER/NAME`: it downloads in threads,
which would have to end before Ctrl-C ends the run if they were of this process.
"""

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from areal_like.backends.ray import bound
from areal_like.backends.ray.lifetime import PACKAGE_ROOT
from areal_like.core.checkpoint.files import call_disk
from areal_like.core.config.schema import SCORERS, RunConfig, TrainerRole
from areal_like.core.errors import PreparationError
from areal_like.demo.init_model import write_init_model
from areal_like.preflight.weights import is_local

USERS_UMASK = os.umask(0o077)
os.umask(USERS_UMASK)
NOT_DOWNLOADED = 3  # exit code: standard output gives the reason


async def model_directory(config: RunConfig, directory: Path) -> Path:
    """Return where the model lies, made or downloaded if it does not yet. Raises PreparationError."""
    if config.actor.init_model:
        made = directory / "initial_model"
        write = partial(write_init_model, seed=config.seed, dtype=config.actor.dtype)
        try:
            await call_disk(write, config.actor.init_model, made)
        except (OSError, SafetensorError) as error:
            raise PreparationError(f"the model (actor.init_model) cannot be written to {made}: {error}") from error
        return made.absolute()
    return await local_directory(str(config.actor.path), "actor.path")


async def model_directories(config: RunConfig, directory: Path) -> dict[TrainerRole, Path]:
    """Return where the model of each role lies; one without `path` has the actor's. Raises PreparationError."""
    found: dict[TrainerRole, Path] = {"actor": await model_directory(config, directory)}
    for role, engine in config.roles.items():
        if role != "actor":
            found[role] = await local_directory(engine.path, f"{role}.path") if engine.path else found["actor"]
    return found


def scored_models(config: RunConfig) -> dict[str, Path]:
    """Return the directories of models that only score, by key; hub names are downloaded when their servers start."""
    paths = {f"{SCORERS[role]}.path": str(section.path) for role, section in config.scorers.items()}
    return {key: Path(path).absolute() for key, path in paths.items() if is_local(path)}


async def local_directory(path: str, key: str) -> Path:
    """Return where a model lies, downloaded if it is a hub name; raise PreparationError, which names the key."""
    return Path(path).absolute() if is_local(path) else await _download_to_cache(path, key)


async def _download_to_cache(name: str, key: str) -> Path:
    """Return where the hub's cache holds a model; the process that fills it ends with this one or on cancellation."""
    python_path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", bound.__file__, str(os.getpid())),
        *(sys.executable, "-P", "-m", __name__, name, f"{USERS_UMASK:o}"),
        env={**os.environ, "PYTHONPATH": python_path},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output = (await process.communicate())[0].decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code := process.returncode:
        reason = output if code == NOT_DOWNLOADED else f"exit code {code}"
        raise PreparationError(f"{name} ({key}) cannot be downloaded: {reason}")
    return Path(output.splitlines()[-1])


def _download(name: str, umask: str) -> int:
    """Print the directory or the reason; returns the exit code."""
    import httpx
    from huggingface_hub import snapshot_download

    try:
        os.umask(int(umask, 8))  # the hub's cache may be shared with others, unlike the run's directory
        print(snapshot_download(name))
    except (OSError, httpx.HTTPError) as error:  # the errors of the hub are both
        print(error)
        return NOT_DOWNLOADED
    return 0


if __name__ == "__main__":
    sys.exit(_download(*sys.argv[1:]))
