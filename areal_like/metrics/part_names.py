"""Limit on the names of reward parts in a run's metrics, because user code may return another one for each response."""

from collections.abc import Callable, Mapping

PREFIX = "reward_parts/"
MOST, LONGEST = 100, 200  # names, and characters of a name


class PartNames:
    """The first MOST names of a run's reward parts; `say` receives one warning about all others."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._known: set[str] = set()
        self._has_warned = False

    def limit(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return a step's statistics without the parts that are not recorded."""
        return {name: value for name, value in stats.items() if PREFIX not in name or self._admit(name)}

    def _admit(self, name: str) -> bool:
        if name in self._known:
            return True
        part = name.partition(PREFIX)[2]
        if len(self._known) < MOST and len(part) <= LONGEST:
            self._known.add(name)
            return True
        if not self._has_warned:
            self._has_warned = True
            shown = part if len(part) <= LONGEST else f"{part[:LONGEST]}..."
            self._say(
                f"warning: the values that reward.function or workflow returns beside the reward have more than {MOST} "
                f"names, or a name of more than {LONGEST} characters. {shown!r} and further such names are not recorded "
                "in the metrics. Return a dict with the same few keys for every response"
            )
        return False
