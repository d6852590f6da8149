"""Exits of commands with a message."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from areal_like.errors import RunError
from areal_like.metrics.console import complain

UNREADABLE = 2


def refuse(message: str) -> NoReturn:
    """Print an error and exit with code 2."""
    complain([f"error: {message}"])
    raise typer.Exit(UNREADABLE)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit with a message if the body cannot read or write the files of a run."""
    try:
        yield
    except RunError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{error.filename} cannot be used: {error.strerror}" if error.filename else str(error))
