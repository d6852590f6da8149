"""Counts of a run's episodes by outcome, with a limit on failures."""

from collections import Counter, deque
from collections.abc import Callable, Mapping

from areal_like.capabilities.agents.session import Session
from areal_like.core.errors import RunError


class Outcomes:
    """Counts of how episodes ended; more than `max_failed_share` failures of a `batch` raise RunError."""

    def __init__(self, batch: int, max_failed_share: float, say: Callable[[str], None]) -> None:
        self._last: deque[str | None] = deque(maxlen=batch)
        self._max_failed_share, self._say = max_failed_share, say
        self._seen: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()
        self._given: dict[str, Counter[str]] = {}  # by the names of parameters

    def add(self, cause: str | None, message: str = "", episodes: int = 1) -> None:
        """Count episodes with the same outcome, None for success; the first failure of each cause is reported."""
        self._last.extend([cause] * episodes)
        self._counts[cause or "done"] += episodes
        if cause is None:
            return
        if cause not in self._seen:
            self._seen.add(cause)
            self._say(f"an episode of the workflow failed ({cause}): {message}")
        causes = Counter(cause for cause in self._last if cause is not None)
        full = len(self._last) == self._last.maxlen
        if full and causes.total() > self._max_failed_share * len(self._last):
            counts = ", ".join(f"{count} {cause}" for cause, count in causes.items())
            raise RunError(
                f"{causes.total()} of the last {len(self._last)} episodes of the workflow failed ({counts}), more than "
                f"episode.max_failed_share allows; the last failure: {message}"
            )

    def add_graded(self, limit: str) -> None:
        """Count an episode that reached a limit and was graded."""
        self._last.append(None)
        self._counts[f"graded {limit}"] += 1

    def add_turns(self, session: Session) -> None:
        """Count an episode's turns by continuity, and its orphaned, aborted and repeated requests."""
        self._turns.update({str(continuity): n for continuity, n in session.continuities.items()})
        others = {"orphaned": len(session.orphans), "aborted": session.attempts.aborted, "repeated": session.repeated}
        self._turns.update({name: n for name, n in others.items() if n})

    def add_counts(self, parameter: str, counts: Mapping[str, float]) -> None:
        """Add the counts of an episode's parameter."""
        self._given.setdefault(parameter, Counter()).update(counts)

    def counts(self) -> dict[str, float]:
        """Return counts since the last call: `episodes/done` or `episodes/CAUSE` of failure, and `turns/CONTINUITY`.

        The turns also include `orphaned`, whose answers no client read, and requests that were `aborted` because the
        client left, or `repeated`, which got an earlier attempt's answer. The counts of parameters, such as
        `sandbox/starts`, have their names first; seconds are means per start.
        """
        episodes = {f"episodes/{cause.replace(' ', '_')}": float(n) for cause, n in self._counts.items()}
        turns = {f"turns/{kind}": float(n) for kind, n in self._turns.items()}
        given = {
            f"{parameter}/{name}": n / max(1, own["starts"]) if name.endswith("_s") else float(n)
            for parameter, own in self._given.items()
            for name, n in own.items()
        }
        for counter in (self._counts, self._turns, self._given):
            counter.clear()
        return episodes | turns | given
