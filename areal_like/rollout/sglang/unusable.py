"""Errors of servers whose answers lack columns that the trainer needs beside tokens and log-probs."""

from areal_like.columns import Column, served_columns
from areal_like.errors import ServerError


def refuse(server: str, problem: object, column: Column) -> ServerError:
    """Return the error of a server without a usable column; it would compute the same again."""
    return ServerError(f"{server} {problem}. {column.fix}", "unusable", [server])


def refuse_field(server: str, error: Exception) -> ServerError | None:
    """Return the error of an answer that cannot be decoded because of a field of a column; None for other fields."""
    for column in served_columns().values():
        if any(f"meta_info.{name}" in str(error) for name in column.sent):
            return refuse(server, f"gave an unusable answer: {error}", column)
    return None
