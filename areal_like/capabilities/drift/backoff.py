"""Selects the servers that score the drift alarm's probe: a server that was too slow pauses, longer each time."""

from collections import Counter
from collections.abc import Iterable

from areal_like.rollout.server import Server

LONGEST = 64  # steps that a server pauses at most


class Backoff:
    """Pauses a server for 1 step after it failed to score, then for 2, 4, ... up to LONGEST, until it scores again."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()  # in a row
        self._pauses: Counter[str] = Counter()  # steps left

    def select(self, servers: Iterable[Server]) -> list[Server]:
        """Return the servers that score in this step, which counts as one of the others' pause."""
        paused = {server.name for server in servers if self._pauses[server.name]}
        self._pauses -= Counter(paused)
        return [server for server in servers if server.name not in paused]

    def note_failure(self, server: Server) -> int:
        """Return for how many steps a server pauses that failed to score."""
        steps = min(2 ** min(self._failures[server.name], LONGEST), LONGEST)
        self._failures[server.name] += 1
        self._pauses[server.name] = steps
        return steps

    def note_score(self, server: Server) -> None:
        """Forget the failures of a server that scored."""
        del self._failures[server.name]
