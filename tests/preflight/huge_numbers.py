"""A program: checks FILE with each nth number of the schema set to a huge one, and prints its key before it does."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

from areal_like.core.config.findings import ConfigError
from areal_like.core.config.keys import all_keys, annotation_of, members
from areal_like.core.config.load import load
from areal_like.launch import check

HUGE = 10**13 - 1
MEMORY = 16 << 30  # of addresses; an array with as many elements as the number has more


def main(file: Path, nth: int, *others: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    numbers = [key for key in all_keys() if {int, float} & set(map(_plain, members(annotation_of(key))))][::nth]
    for key in numbers:
        print(key, flush=True)
        with contextlib.suppress(ConfigError):
            check(load(file, [*others, f"{key}={HUGE}"]), dry_run=True)
    print(f"{len(numbers)} numbers", flush=True)


def _plain(annotation: object) -> object:
    """The type of `Annotated[int, ...]`."""
    return getattr(annotation, "__origin__", annotation)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
