"""Simulated servers fail under the real controller code; the benchmark does the same with 512 hosts."""

from __future__ import annotations

import pytest

from benchmarks.failing_hosts import Case, train
from benchmarks.simulated_time import simulate

pytestmark = pytest.mark.covers("server restart")


def test_no_sample_is_lost_or_trained_twice_while_hosts_fail() -> None:
    found = simulate(train(Case(hosts=6, minutes=10)))  # it checks groups and tokens itself
    assert set(found["failures"]) == {"process", "host", "cut"}
    assert found["steps"] > 2
    assert found["failed_share"] > 0
    assert found["groups_trained_twice"] == found["responses_with_lost_or_repeated_tokens"] == 0
