"""Samples of one prompt that wait together: the first is prefilled, the others find its keys and values in the cache.

SGLang prefills them all in one pass, each for itself. On a CPU, where a pass costs little more than its tokens do, the
other samples wait for the next pass, which computes one token for each.
"""

from collections.abc import Callable, Sequence
from typing import Any


def prefilling_once() -> type:
    """Return SGLang's Scheduler, with equal prompts waiting for the first of them."""
    from sglang.srt.managers.schedule_policy import match_prefix_for_req
    from sglang.srt.managers.scheduler import Scheduler

    class PrefillingOnce(Scheduler):
        waiting_queue: list[Any]

        def get_new_batch_prefill(self, running_batch: Any) -> Any:
            later = followers(self.waiting_queue, self._in_cache) if self._prefills_once else []
            held = set(later)
            self.waiting_queue = [request for request in self.waiting_queue if request not in held]
            try:
                return super().get_new_batch_prefill(running_batch)
            finally:
                self.waiting_queue[:0] = later  # the first of the next pass

        @property
        def _prefills_once(self) -> bool:
            """Deterministic samples do not depend on the cache."""
            shares = not (self.server_args.disable_radix_cache or self.server_args.enable_deterministic_inference)
            return self.device == "cpu" and shares

        def _in_cache(self, request: Any) -> bool:
            """Return whether a cache has the prompt, except for its last token, which is always computed."""
            match_prefix_for_req(self.tree_cache, request, include_req=True)
            return request.num_matched_prefix_tokens >= len(request.origin_input_ids) - self.page_size

    return PrefillingOnce


def followers(waiting: Sequence[Any], in_cache: Callable[[Any], bool]) -> list[Any]:
    """Return the requests that should wait for a pass: an earlier one has their prompt, not yet `in_cache`."""
    seen: set[tuple[Any, ...]] = set()
    later: dict[tuple[Any, ...], list[Any]] = {}
    for request in waiting:
        if not request.output_ids:  # a retracted request continues from its own tokens
            prompt = (request.extra_key, *request.origin_input_ids)
            if prompt in seen:
                later.setdefault(prompt, []).append(request)
            seen.add(prompt)
    return [request for same in later.values() if not in_cache(same[0]) for request in same]
