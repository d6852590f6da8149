"""What workers and the main process send each other, and what the main process refuses to read."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest

from areal_like.capabilities.agents.workers.frames import Frames, Kind, NotPlain, frame, plain
from areal_like.capabilities.agents.workers.watch import user_line
from areal_like.types import FinishReason, Reward, Trajectory

DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.12/selectors.py", line 468 in select
  File "/home/me/other.py", line 3 in run

Current thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.12/re/__init__.py", line 167 in match
  File "/home/me/agent.py", line 9 in run
  File "/src/areal_like/capabilities/agents/workers/worker.py", line 99 in _step
"""


def test_messages_come_out_as_they_went_in_however_they_are_cut():
    sent = [(Kind.CALL, 1, b"x" * 1000), (Kind.ASK, 2**40, b""), (Kind.DONE, 3, b"\x00")]
    stream = b"".join(frame(*each) for each in sent)
    for size in (1, 7, 999, len(stream)):
        got: list[tuple[Kind, int, bytes]] = []
        frames = Frames(lambda *each, got=got: got.append(each), lambda: None)
        for start in range(0, len(stream), size):
            frames.data_received(stream[start : start + size])
        assert got == sent


def test_trajectories_leave_a_worker():
    item = Trajectory(0, 0, np.arange(3), np.zeros(3, np.float32), np.full(3, -1), FinishReason.STOP, 0.5, {"a": 1.0})
    (copy,) = plain(pickle.dumps([item]))
    assert copy.tokens.tolist() == [0, 1, 2] and copy.reward_parts == {"a": 1.0}
    assert plain(pickle.dumps((True, Reward(None)))) == (True, Reward(None))


@pytest.mark.parametrize("body", [pickle.dumps(Fraction(1, 2)), pickle.dumps(print), b"noise", b""])
def test_nothing_else_is_read(body):
    with pytest.raises(NotPlain):
        plain(body)


def test_the_line_of_a_stack_is_the_innermost_of_the_user_s():
    assert user_line(DUMP, 0x7F0000000002) == "/home/me/agent.py:9"
    assert user_line(DUMP, 0x7F0000000001) == "/home/me/other.py:3"
    assert user_line(DUMP, 5) == ""
