"""Keys that capabilities add to a section: bases of its class, so that each key has one place, type and description."""

from collections.abc import Callable

from pydantic import create_model

from areal_like.config.section import Section
from areal_like.registry import find_modules


def takes_keys[S: Section](place: str) -> Callable[[type[S]], type[S]]:
    """Return a decorator that gives a section the keys of capabilities for `place`, its dotted key; "" is the run."""

    def add(section: type[S]) -> type[S]:
        # a folder that adds a section of its own is still being loaded when this section takes keys
        declared = [getattr(module, "KEYS", {}).get(place) for _, module in find_modules("schema")]
        bases = (*filter(None, declared), section)
        if len(bases) == 1:
            return section
        return create_model(section.__name__, __base__=bases, __module__=section.__module__, __doc__=section.__doc__)

    return add
