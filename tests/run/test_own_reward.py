"""The example of rewards of one's own, as its users run it: with the installed package and the real engines."""

from __future__ import annotations

import pytest
from running import ROOT, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

OWN = ROOT / "examples/own_reward/my_rewards.py"


@pytest.mark.long
def test_own_rewards_train_and_their_parts_are_recorded(tmp_path) -> None:
    parts = (
        f"reward.parts.right.function={OWN}:score",
        f"reward.parts.close.function={OWN}:close",
        f"reward.parts.short.function={OWN}:shortest",
        "reward.parts.close.weight=0.25",
    )
    more = ("total_train_steps=2", "warm_start.target_reward=0.2", "warm_start.steps=100", "saver.freq_steps=null")
    with run(tmp_path, *parts, *more) as started:
        assert started.end() == 0, started.errors
        assert started.remains() == []
    events = EventAccumulator(str(started.directory / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {f"reward_parts/{name}" for name in ("right", "close", "short", "close.off")} <= tags
    assert not {tag for tag in tags if tag.startswith("reward_missing/")}
    last = {tag: events.Scalars(tag)[-1].value for tag in tags}
    weighted = last["reward_parts/right"] + 0.25 * last["reward_parts/close"] + last["reward_parts/short"]
    assert last["reward/mean"] == pytest.approx(weighted, abs=1e-5)
