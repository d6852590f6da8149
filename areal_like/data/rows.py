"""Rows of a dataset with the files that they are from, and errors about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

type Record = Mapping[str, Any]


class DatasetError(Exception):
    """A dataset that cannot be used.

    `code` is the code of the finding, `field` the faulty field of the dataset's config; `problem` names file and row,
    `remedy` is the fix.
    """

    def __init__(self, field: str, problem: str, remedy: str, *, code: str = "RUN-DATASET-FILE") -> None:
        super().__init__(f"{problem}; {remedy}")
        self.code, self.field, self.problem, self.remedy = code, field, problem, remedy


@dataclass(frozen=True)
class Records:
    """The rows of a dataset, in order.

    `parts` are the names of the files, or of the one source, with their numbers of rows. With `keeps_nulls` a null in a
    row is one of its author's, else nulls are left out (`arrow_rows.py`).
    """

    rows: Sequence[Record]
    parts: Sequence[tuple[str, int]]
    keeps_nulls: bool = True

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[str, Sequence[Record]]], *, keeps_nulls: bool = True) -> "Records":
        """Return the rows of several files, one after the other."""
        rows = [row for _, rows in parts for row in rows]
        return cls(rows, [(name, len(rows)) for name, rows in parts], keeps_nulls)

    def first(self, count: int) -> "Records":
        """Return the first rows."""
        return replace(self, rows=self.rows[:count])

    def place(self, row: int) -> str:
        """Return the file of a row and its number there, from 1."""
        name, first = self._part(row)
        return f"{name}, row {row - first + 1}"

    def folder(self, row: int) -> Path:
        """Return the folder that paths in a row are relative to: the file's folder, else the current one."""
        file = Path(self._part(row)[0])
        return file.absolute().parent if file.is_file() else Path.cwd()

    def _part(self, row: int) -> tuple[str, int]:
        """Return the name of a row's file and the number of the file's first row."""
        first = 0
        for name, count in self.parts:
            if row < first + count:
                return name, first
            first += count
        raise IndexError(f"row {row} of {first}")
