"""Staleness is bounded for every single group, whatever finishes when."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.rollout.admission import Admission


def fill(admission, started_at, running):
    """Start as many groups as may be started."""
    while admission.capacity:
        group = len(started_at)
        started_at[group] = admission.published
        admission.start(group)
        running.append(group)


@given(
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    steps=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    slow=st.sets(st.integers(0, 30), max_size=4),
)
def test_no_group_is_trained_after_its_bound_and_none_is_lost(batch_size, max_staleness, steps, seed, slow):
    """Slow groups finish only when nothing else can, the worst case for a bound per trajectory."""
    rng = random.Random(seed)
    admission = Admission(batch_size, max_staleness)
    started_at, running, finished, trained = {}, [], set(), []
    for version in range(steps):
        while True:
            fill(admission, started_at, running)
            batch = admission.take(finished)
            if batch is not None:
                break
            assert running, "the run would wait for ever"
            quick = [group for group in running if group not in slow]
            done = rng.choice(quick or running)
            running.remove(done)
            finished.add(done)
        assert len(batch) == batch_size
        for group in batch:
            assert version - started_at[group] <= max_staleness
        trained += batch
        finished -= set(batch)
        fill(admission, started_at, running)  # servers keep generating while the trainer trains
        admission.publish(version + 1)
    assert len(trained) == len(set(trained)) == steps * batch_size


@given(
    batch_size=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    steps=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    dropped_share=st.floats(0, 0.9),
)
def test_a_dropped_group_leaves_its_place_to_a_new_one_that_is_as_fresh(
    batch_size, max_staleness, steps, seed, dropped_share
):
    """Batches stay complete, nothing is trained after its bound, and what is dropped is never trained."""
    rng = random.Random(seed)
    admission = Admission(batch_size, max_staleness)
    started_at, running, finished, dropped, trained = {}, [], set(), set(), []

    for version in range(steps):
        fill(admission, started_at, running)
        while (batch := admission.take(finished)) is None:
            assert running, "the run would wait for ever"
            group = running.pop(rng.randrange(len(running)))
            if rng.random() < dropped_share:
                dropped.add(group)
                admission.drop(group)
            else:
                finished.add(group)
            fill(admission, started_at, running)
        assert len(batch) == batch_size
        assert all(version - started_at[group] <= max_staleness for group in batch)
        trained += batch
        finished -= set(batch)
        fill(admission, started_at, running)
        if running and rng.random() < dropped_share:  # while the step trains
            dropped.add(group := running.pop())
            admission.drop(group)
            fill(admission, started_at, running)
        admission.publish(version + 1)
    assert len(trained) == len(set(trained)) == steps * batch_size
    assert not dropped & set(trained)


def test_only_a_group_that_waits_can_be_dropped():
    admission = Admission(batch_size=1, max_staleness=0)
    admission.start(0)
    assert admission.take({0}) == [0]
    with pytest.raises(KeyError):
        admission.drop(0)


def test_synchronous_training_starts_nothing_while_a_batch_trains():
    admission = Admission(batch_size=2, max_staleness=0)
    assert admission.capacity == 2
    admission.start(0)
    admission.start(1)
    assert admission.capacity == 0
    assert admission.take({0, 1}) == [0, 1]
    assert admission.capacity == 0
    admission.publish(1)
    assert admission.capacity == 2


def test_fast_groups_overtake_a_slow_one_until_its_deadline():
    admission = Admission(batch_size=1, max_staleness=1)
    admission.start(0)  # slow
    admission.start(1)
    assert admission.take({1}) == [1]  # version 0: group 0 may still wait for version 1
    admission.publish(1)
    admission.start(2)
    assert admission.take({2}) is None  # version 1 is group 0's deadline
    assert admission.take({0, 2}) == [0]


def test_starting_beyond_capacity_is_refused():
    admission = Admission(batch_size=1, max_staleness=0)
    admission.start(0)
    with pytest.raises(RuntimeError, match="staleness could exceed 0"):
        admission.start(1)


@given(
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 3),
    spare=st.integers(1, 6),
    steps=st.integers(1, 10),
    seed=st.integers(0, 10**6),
)
def test_with_spare_groups_the_slow_ones_are_given_up_and_the_bound_holds(
    batch_size, max_staleness, spare, steps, seed
):
    rng = random.Random(seed)
    admission = Admission(batch_size, max_staleness, spare=spare)
    started_at, running, finished, trained, given_up = {}, [], set(), [], []

    for version in range(steps):
        fill(admission, started_at, running)
        while (batch := admission.take(finished)) is None:
            assert running, "the run would wait for ever"
            finished.add(running.pop(rng.randrange(len(running))))
        assert len(batch) == batch_size
        assert all(version - started_at[group] <= max_staleness for group in batch)
        assert len(admission.given_up) <= spare
        unfinished = [group for group in admission.given_up if group not in finished]
        assert len(unfinished) == len(admission.given_up) or not max_staleness or not set(running) - set(unfinished)
        finished -= {*batch, *admission.given_up}
        running = [group for group in running if group not in admission.given_up]
        trained += batch
        given_up += admission.given_up
        admission.publish(version + 1)
    assert len({*trained, *given_up}) == len(trained) + len(given_up)
    assert sorted({*trained, *given_up, *admission.waiting}) == list(range(len(started_at)))


def test_synchronous_training_with_a_spare_group_does_not_wait_for_the_last():
    admission = Admission(batch_size=2, max_staleness=0, spare=1)
    for group in range(3):
        admission.start(group)
    assert admission.take({2}) is None
    assert admission.take({0, 2}) == [0, 2]
    assert admission.given_up == [1]
    assert admission.capacity == 0
    admission.publish(1)
    assert admission.capacity == 3


class Counting(set):
    """Groups that have finished, and how often it was asked for one."""

    asked = 0

    def __contains__(self, group):
        self.asked += 1
        return super().__contains__(group)


@pytest.mark.parametrize("spare", [0, 1000])
def test_to_ask_for_a_batch_costs_as_much_as_groups_wait(spare):
    """It is asked for at every group that ends; where the newest end first, all others are late."""
    admission = Admission(1000, 1, spare=spare)
    started_at = {}
    fill(admission, started_at, [])
    admission.publish(1)
    fill(admission, started_at, [])
    finished = Counting(admission.waiting[-1000:])
    assert admission.take(finished) is None
    assert finished.asked <= 2 * len(started_at)
