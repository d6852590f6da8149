"""Containers of a run's sandboxes, which are found by label, because they are not in the run's process tree.

A file in the run's temporary directory names each program that has started containers (docker, podman).
"""

import subprocess
from contextlib import suppress
from pathlib import Path

_FILE = "containers."
LIMIT_S = 60.0  # for one program to remove them


def label(run_id: str) -> str:
    """Return the label of a run's containers."""
    return f"areal-like.run={run_id}"


def note_containers(directory: Path, program: str) -> None:
    """Register containers started by `program`, a path, with the janitor of this temporary directory's run."""
    with suppress(FileNotFoundError):  # the run has ended
        (directory / f"{_FILE}{program.replace('/', '%')}").touch()


def remove_containers(directory: Path, run_id: str) -> None:
    """Remove the containers of a run, including running ones."""
    for file in directory.glob(f"{_FILE}*"):
        program = file.name.removeprefix(_FILE).replace("%", "/")
        found = _output([program, "ps", "--all", "--quiet", "--filter", f"label={label(run_id)}"]).split()
        if found:
            _output([program, "rm", "--force", "--volumes", *found])


def _output(command: list[str]) -> str:
    """Return the output of a program, "" if it fails, so that the clean-up of the run continues."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        return done.stdout
    return ""
