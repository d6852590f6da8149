"""When requests that wait are prefilled: not one at a time, and equal prompts once.

On a GPU, a prefill makes every running request wait for a pass that the host launches kernel by kernel. Where requests
end and start one at a time, SGLang 0.5.17 would prefill after most decoding passes: a third of the speed of 0.1B.
So waiting requests gather. SGLang's own `--enable-prefill-delayer` does the same, but its ranks exchange their numbers
before each pass, which takes 0.4 ms, and its limit in seconds may pass on one rank before another. Here all ranks apply
the same rule to numbers that are equal on all of them.

On a CPU, a pass costs little more than its tokens do. There, samples of one prompt wait until the first is prefilled,
and find its keys and values in the cache; each of them then computes a single token.
"""

from collections.abc import Callable, Sequence
from typing import Any

from areal_like.rollout.sglang.patch import Launch, Patch

GATHERED = 0.1  # share of the running requests that waits before a prefill
MOST_PASSES = 32  # that a request waits; 0.3 s of a small model


def prefilling_once() -> type:
    """Return SGLang's Scheduler, with requests that wait for others."""
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.schedule_batch import NextBatchPlan
    from sglang.srt.managers.schedule_policy import match_prefix_for_req

    class PrefillingOnce(scheduler.Scheduler):  # type: ignore[misc,name-defined]
        waiting_queue: list[Any]
        delayed = 0  # passes since a request could have been prefilled

        def get_new_batch_prefill(self, running_batch: Any) -> Any:
            if self._gathers and self.chunked_req is None:
                waits = gathers(len(self.waiting_queue), len(running_batch.reqs), self.delayed)
                self.delayed = self.delayed + 1 if waits else 0
                if waits:
                    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
            later = followers(self.waiting_queue, self._in_cache) if self._prefills_once else []
            if not later:
                return super().get_new_batch_prefill(running_batch)
            held = set(later)
            self.waiting_queue = [request for request in self.waiting_queue if request not in held]
            try:
                return super().get_new_batch_prefill(running_batch)
            finally:
                self.waiting_queue[:0] = later  # the first of the next pass

        @property
        def _gathers(self) -> bool:
            """A user's own delay decides alone."""
            return self.device == "cuda" and self.prefill_delayer is None and self.min_free_slots_delayer is None

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


def gathers(waiting: int, running: int, passes: int) -> bool:
    """Return whether a prefill waits for more requests, after it has waited for a number of passes."""
    return 0 < waiting < int(running * GATHERED) and passes < MOST_PASSES


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


def prefill_once(launch: Launch) -> None:
    """Let requests of a server that generates wait for others."""
    if launch.generates:
        from sglang.srt.managers import scheduler

        scheduler.Scheduler = prefilling_once()


PATCH = Patch(schedule=prefill_once)
