"""Log-probs of given tokens at the temperature of the policy, for a teacher.

SGLang 0.5.17 applies a temperature to the tokens that it generates and never to its input, whose log-probs always have
temperature 1. A teacher generates nothing, so all of its logits are divided.
"""

from typing import Any

from areal_like.rollout.sglang.patch import SCORE, Launch, Patch


def score_at_temperature(launch: Launch) -> None:
    """Divide all logits of a server that scores by its temperature."""
    if SCORE not in launch.own:
        return
    from sglang.srt.layers.logits_processor import LogitsProcessor

    compute, temperature = LogitsProcessor._get_logits, float(launch.own[SCORE])

    def compute_scaled(self: Any, *given: Any, **named: Any) -> Any:
        return compute(self, *given, **named) / temperature

    LogitsProcessor._get_logits = compute_scaled


PATCH = Patch(flags=(SCORE,), schedule=score_at_temperature)
