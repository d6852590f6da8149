"""Staleness is bounded for every single group, whatever finishes when."""

import random

import pytest
from counting import count_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.core.rollout.admission import Admission


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
    started_at, running, trained = {}, [], []
    for version in range(steps):
        while True:
            fill(admission, started_at, running)
            batch = admission.take()
            if batch is not None:
                break
            assert running, "the run would wait for ever"
            quick = [group for group in running if group not in slow]
            done = rng.choice(quick or running)
            running.remove(done)
            admission.finish(done)
        assert len(batch) == batch_size
        for group in batch:
            assert version - started_at[group] <= max_staleness
        trained += batch
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
    started_at, running, dropped, trained = {}, [], set(), []

    for version in range(steps):
        fill(admission, started_at, running)
        while (batch := admission.take()) is None:
            assert running, "the run would wait for ever"
            group = running.pop(rng.randrange(len(running)))
            if rng.random() < dropped_share:
                dropped.add(group)
                admission.drop(group)
            else:
                admission.finish(group)
            fill(admission, started_at, running)
        assert len(batch) == batch_size
        assert all(version - started_at[group] <= max_staleness for group in batch)
        trained += batch
        fill(admission, started_at, running)
        if running and rng.random() < dropped_share:  # while the step trains
            dropped.add(group := running.pop())
            admission.drop(group)
            fill(admission, started_at, running)
        admission.publish(version + 1)
    assert len(trained) == len(set(trained)) == steps * batch_size
    assert not dropped & set(trained)


def finish(admission, *groups):
    for group in groups:
        admission.finish(group)


def test_only_a_group_that_waits_can_be_finished_or_dropped():
    admission = Admission(batch_size=2, max_staleness=0)
    admission.start(0)
    admission.start(1)
    admission.finish(0)
    for over in (admission.finish, admission.drop):  # it has finished already
        with pytest.raises(KeyError):
            over(0)
    admission.finish(1)
    assert admission.take() == [0, 1]
    with pytest.raises(KeyError):
        admission.drop(1)


def test_synchronous_training_starts_nothing_while_a_batch_trains():
    admission = Admission(batch_size=2, max_staleness=0)
    assert admission.capacity == 2
    admission.start(0)
    admission.start(1)
    assert admission.capacity == 0
    finish(admission, 1, 0)
    assert admission.take() == [0, 1]
    assert admission.capacity == 0
    admission.publish(1)
    assert admission.capacity == 2


def test_fast_groups_overtake_a_slow_one_until_its_deadline():
    admission = Admission(batch_size=1, max_staleness=1)
    admission.start(0)  # slow
    admission.start(1)
    admission.finish(1)
    assert admission.take() == [1]  # version 0: group 0 may still wait for version 1
    admission.publish(1)
    admission.start(2)
    admission.finish(2)
    assert admission.take() is None  # version 1 is group 0's deadline
    admission.finish(0)
    assert admission.take() == [0]


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
        while (batch := admission.take()) is None:
            assert running, "the run would wait for ever"
            finished.add(group := running.pop(rng.randrange(len(running))))
            admission.finish(group)
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
    admission.finish(2)
    assert admission.take() is None
    admission.finish(0)
    assert admission.take() == [0, 2]
    assert admission.given_up == [1]
    assert admission.capacity == 0
    admission.publish(1)
    assert admission.capacity == 3


class Reference:
    """The same rules, read off the invariant group by group: every event costs as much as groups wait."""

    def __init__(self, batch_size, max_staleness, version=0, spare=0):
        self.batch_size, self.max_staleness, self.spare = batch_size, max_staleness, spare
        self.published = self.next_trained = version
        self.given_up = []
        self._waiting = []  # group, deadline
        self._finished = set()

    @property
    def waiting(self):
        return [group for group, _ in self._waiting]

    @property
    def capacity(self):
        steps = self.published + self.max_staleness - self.next_trained + 1
        return max(0, steps * self.batch_size + self.spare - len(self._waiting)) if steps > 0 else 0

    def start(self, group):
        self._waiting.append((group, self.published + self.max_staleness))

    def finish(self, group):
        self._finished.add(group)

    def drop(self, group):
        self._waiting = [entry for entry in self._waiting if entry[0] != group]

    def publish(self, version):
        self.published = version

    def take(self):
        batch = [group for group in self.waiting if group in self._finished][: self.batch_size]
        rest = [entry for entry in self._waiting if entry[0] not in batch]
        late, unfinished = [], []
        for place, (group, deadline) in enumerate(rest):
            unfinished += [] if group in self._finished else [group]
            if deadline < self.next_trained + 1 + (place - len(late)) // self.batch_size:
                late.append(unfinished.pop() if unfinished else group)
        if len(batch) < self.batch_size or len(late) > self.spare:
            return None
        self._waiting = [entry for entry in rest if entry[0] not in late]
        self.given_up = late
        self.next_trained += 1
        return batch


@settings(max_examples=100)
@given(
    batch_size=st.integers(1, 6),
    max_staleness=st.integers(0, 5),
    spare=st.integers(0, 6),
    seed=st.integers(0, 10**6),
    eager=st.floats(0, 1),
    newest_first=st.booleans(),
)
def test_the_bookkeeping_decides_as_the_invariant_read_group_by_group(
    batch_size, max_staleness, spare, seed, eager, newest_first
):
    """Also where groups are dropped, some start late, and a batch is asked for more than once."""
    rng = random.Random(seed)
    both = Admission(batch_size, max_staleness, spare=spare), Reference(batch_size, max_staleness, spare=spare)
    running, started = [], 0

    def same(what):
        mine, reference = map(what, both)
        assert mine == reference
        return mine

    for _ in range(200):
        action = rng.random()
        if action < 0.4 and same(lambda one: one.capacity):
            for one in both:
                one.start(started)
            running.append(started)
            started += 1
        elif action < 0.8 and running:
            group = running.pop(-1 if newest_first and rng.random() < 0.9 else rng.randrange(len(running)))
            for one in both:
                (one.finish if group % 7 else one.drop)(group)
        elif action < 0.8 + 0.2 * eager:
            if same(lambda one: one.take()) is not None:
                given_up = same(lambda one: sorted(one.given_up))
                running = [group for group in running if group not in given_up]
        elif both[0].published < both[0].next_trained:
            for one in both:
                one.publish(one.published + 1)
        same(lambda one: one.waiting)


@pytest.mark.parametrize("spare", [0, 100])
def test_what_an_event_costs_does_not_grow_with_the_groups_that_wait(spare):
    """Counted in lines that run, as time depends on the machine; the newest end first, so that all others are late."""

    def lines(batch_size):
        admission = Admission(batch_size, 1, spare=spare)
        started_at = {}
        fill(admission, started_at, [])
        admission.publish(1)
        fill(admission, started_at, [])
        newest = admission.waiting[: -batch_size - 1 : -1]
        finish(admission, *newest[:-1])
        return count_lines(
            lambda: (admission.take(), admission.finish(newest[-1]), admission.capacity, admission.take())
        )

    assert lines(10_000) <= lines(1000)
