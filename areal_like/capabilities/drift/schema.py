"""Keys of the drift alarm, in `rollout`."""

from typing import Annotated

from pydantic import Field

from areal_like.core.config.ignored import ignored_if
from areal_like.core.config.section import Section


class DriftKeys(Section):
    """How often servers and trainer are compared, and how long they may differ."""

    drift_patience: Annotated[int, ignored_if("rollout.drift_probe_tokens", 0)] = Field(3, ge=1)
    """Consecutive steps beyond `max_logprob_diff` that end the run with the likely cause; fewer are warnings."""
    drift_probe_tokens: int = Field(2048, ge=0)
    """Maximum tokens of responses that every server scores again, twice per probe, and the trainer once (see
    [drift](run.md#drift)); at least one response. Probes take at most 3 % of a run's time. 0: never."""


KEYS = {"rollout": DriftKeys}
