"""Collective weight updates that are aborted because a participant is lost.

Gloo ends no call before its time limit, and a host that is dead or cut off closes no connection. Waiting processes
therefore poll whether the controller has given up the process group. The group itself stays until its call ends, in a
thread: to destroy it earlier would wait for that call.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

LOOK_S = 0.5  # between two looks
_NAME = re.compile(r"[\w-]+")


class GivenUp(RuntimeError):
    """The controller has given up the process group of a call."""


def wait_for(work: Work, group: ProcessGroup, is_given_up: Callable[[], bool]) -> None:
    """Wait for an asynchronous call of gloo; raise GivenUp once its group is given up, else as the call does."""
    while not _is_over(work):
        if is_given_up():
            threading.Thread(target=_keep, args=(work, group), name="given up", daemon=True).start()
            raise GivenUp("the weight update was aborted: the trainer or a participating server was lost")


def mark(name: str) -> None:
    """Note for all processes of this server that a group is given up. Raises ValueError for an unusable name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a process group")
    _note(name).touch()


def is_marked(name: str) -> bool:
    """Return whether a group is given up."""
    return _note(name).exists()


def _is_over(work: Work) -> bool:
    try:
        work.wait(timedelta(seconds=LOOK_S))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises the call's error
    return True


def _keep(work: Work, group: ProcessGroup) -> None:
    """Hold a group until its call has ended."""
    with suppress(RuntimeError):
        work.wait()


def _note(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"given-up-{name}"
