"""The idle share of trainer ranks and servers in a step."""

from collections.abc import Iterable

from areal_like.core.events import Event


def idle_share(events: Iterable[Event], role: str, start: float, end: float) -> float | None:
    """Return the mean share of `start` to `end` without events in lanes `ROLE 0`, `ROLE 1`, ...; None without any."""
    lanes: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.lane.rpartition(" ")[0] == role:
            lanes.setdefault(event.lane, []).append((max(event.start, start), min(event.end, end)))
    if not lanes or end <= start:
        return None
    return 1 - sum(map(_cover, lanes.values())) / (len(lanes) * (end - start))


def _cover(spans: list[tuple[float, float]]) -> float:
    """Return the seconds in at least one of the spans."""
    seconds, reached = 0.0, 0.0
    for start, end in sorted(spans):
        seconds += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return seconds
