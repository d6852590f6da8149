"""Samples of one prompt that wait together: the first is prefilled, the others find its keys and values in the cache.

SGLang prefills them all in one pass, each for itself. On a CPU, where a pass costs little more than its tokens do, the
other samples had better wait for the next pass, of which every one is a token then.
"""

from collections.abc import Callable, Sequence
from typing import Any


def followers(waiting: Sequence[Any], in_cache: Callable[[Any], bool]) -> list[Any]:
    """The requests that should wait for a pass, as their prompt is that of one before them and not `in_cache` yet."""
    seen: set[tuple[Any, ...]] = set()
    later: dict[tuple[Any, ...], list[Any]] = {}
    for request in waiting:
        if not request.output_ids:  # one that was retracted goes on from its own tokens
            prompt = (request.extra_key, *request.origin_input_ids)
            if prompt in seen:
                later.setdefault(prompt, []).append(request)
            seen.add(prompt)
    return [request for same in later.values() if not in_cache(same[0]) for request in same]
