"""Search for the files in /dev/shm that a run created: a killed process leaves them, and they do not name the run."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
LOOKS = 10  # a file is mapped soon after its creation, or is not a process's shared memory


class SharedMemoryWatch:
    """A record of new files that members of the run map; call `look` several times a second."""

    def __init__(self) -> None:
        self._others = _names()
        self._looks: dict[str, int] = {}
        self.made: set[str] = set()

    def look(self, members: Callable[[], Iterable[psutil.Process]]) -> None:
        """Attribute the files that have appeared since the last look; `members` is asked only if there are any."""
        names = _names()
        self._others &= names
        unknown = names - self._others - self.made
        if not unknown:
            return
        maps = [_maps(process) for process in members()]
        self.made |= {name for name in unknown if any(f"{SHARED_MEMORY}/{name}\n" in text for text in maps)}
        self._looks = {name: self._looks.get(name, 0) + 1 for name in unknown - self.made}
        self._others |= {name for name, looks in self._looks.items() if looks >= LOOKS}

    def remove(self) -> None:
        """Unlink files that the run created and did not unlink itself."""
        for name in self.made:
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def _names() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _maps(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:  # ended meanwhile
        return ""
