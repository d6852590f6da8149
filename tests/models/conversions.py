"""What a rank process does in the tests of conversion: the command, where Megatron is imported already."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

from trainer_jobs import LossSpec, Setting, engine, make_batch, sft, squared
from typer.testing import CliRunner

from areal_like.__main__ import app
from areal_like.core.trainer.engine import Rendezvous


def command(
    rendezvous: Rendezvous, listener: socket.socket | None, *arguments: str, file_limit: int | None = None
) -> tuple[int, str]:
    """Exit code and all output of `areal-like convert-checkpoint`; no file may grow beyond `file_limit` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, limits[1]))
    try:
        result = CliRunner().invoke(app, ["convert-checkpoint", *arguments])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def full_disk(rendezvous: Rendezvous, listener: socket.socket | None, *arguments: str) -> tuple[int, str]:
    """The command where files may have 10,000 bytes."""
    return command(rendezvous, listener, *arguments, file_limit=10_000)


def trained(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path) -> None:
    """A checkpoint of both kinds after a training step."""
    with engine(rendezvous, listener, setting) as made:
        made.train(make_batch(), LossSpec(squared if setting.role == "critic" else sft))
        made.save(folder / "state")
        while not made.is_saved():
            pass
        made.finish_save()
        made.save_hf(folder / "hf")
