"""SGLang's scheduler process for a teacher: log-probs of given tokens at the temperature of the policy.

SGLang 0.5.17 applies a temperature to the tokens that it generates and never to its input, whose log-probs always have
temperature 1. A teacher generates nothing, so all of its logits are divided.
"""

from __future__ import annotations

from typing import Any

FLAG = "--score-temperature"  # of our launcher alone


def split_temperature(arguments: list[str]) -> tuple[list[str], float | None]:
    """Return SGLang's own arguments, and the temperature of a server that scores; None for one that generates."""
    if FLAG not in arguments:
        return arguments, None
    place = arguments.index(FLAG)
    return arguments[:place] + arguments[place + 2 :], float(arguments[place + 1])


def run_scheduler(temperature: float, *arguments: Any, **options: Any) -> None:
    """Run SGLang's scheduler process with a changed class, for `launch_server(run_scheduler_process_func=...)`."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.managers.scheduler import run_scheduler_process

    compute = LogitsProcessor._get_logits

    def compute_scaled(self: Any, *given: Any, **named: Any) -> Any:
        return compute(self, *given, **named) / temperature

    LogitsProcessor._get_logits = compute_scaled
    run_scheduler_process(*arguments, **options)
