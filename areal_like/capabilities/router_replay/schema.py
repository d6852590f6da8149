"""The key of router replay, in `rollout`."""

from typing import Literal

from areal_like.config.section import Section


class RouterReplayKeys(Section):
    """Whether the trainer's routers choose the servers' experts."""

    router_replay: Literal["auto", "on", "off"] = "auto"
    """Replay of expert routes (R3): the servers return the experts of every token, and the trainer's routers choose
    them again. `auto`: on for models with experts, where the trainer can replay."""


KEYS = {"rollout": RouterReplayKeys}
