"""Admission: the groups that may start and the groups trained next, so that staleness never exceeds η.

A group that starts while the servers hold version v may hold tokens of version v, so it has the deadline v + η: the
last version at which it may be trained. Each training step takes `batch_size` finished groups. The invariant, with n
the version that the next step trains and d[0] <= d[1] <= ... the deadlines of the groups that wait for training:

    d[j] >= n + j // batch_size        for every j

so training in order of deadline always meets every deadline. A group starts only if the invariant still holds with it,
and a step may take finished groups ahead of slow ones only if it holds for the remaining groups. Hence a slow group
delays a step at its deadline at the latest, and nothing is ever discarded for its age. With η = 0 this is synchronous
training.

A group that the algorithm does not want (`drop`) leaves its place to a new one: the groups behind it move up, which
only loosens the invariant.

With `spare` groups, so many more may start than the invariant allows. A step then takes the first `batch_size` groups
that have finished and gives up as few others as the invariant asks for, unfinished ones first, if `spare` are enough:
it does not wait for the slow, which is quick, and has trained on fewer long responses than the data would give.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Admitted:
    """An admitted group: its id and the last version at which it may be trained."""

    group_id: int
    deadline: int


@dataclass(eq=False)
class _Bucket:
    """The waiting groups of one deadline; `unfinished` is in order of start, `finished` in order of finishing."""

    deadline: int
    unfinished: dict[int, None] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.unfinished) + len(self.finished)


@dataclass
class _Scan:
    """Progress of `take` in checking the invariant: up to the first `buckets`, with so many `unfinished` groups.

    A deadline that is kept stays kept until the next batch, so the scan continues where it stopped. That is never
    behind the last bucket, the only one in which groups start.
    """

    buckets: int = 0
    deadline: int = -1  # of the last of these buckets
    unfinished: int = 0


class Admission:
    """The bookkeeping of a run that begins with `version`; the module's docstring states its invariant.

    Groups are trained in order of deadline, then of id. `start`, `finish` and `drop` cost the same however many groups
    wait; `take` costs more only when it returns a batch.
    """

    def __init__(self, batch_size: int, max_staleness: int, version: int = 0, spare: int = 0) -> None:
        if batch_size < 1 or max_staleness < 0:
            raise ValueError(f"batch_size {batch_size} must be at least 1, max_staleness {max_staleness} at least 0")
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.spare = spare
        self.given_up: list[int] = []  # ids of groups that the last batch was taken without waiting for
        self.published = version  # version that every server holds
        self.next_trained = version  # the version at which the next batch will be trained
        self._waiting: dict[int, _Bucket] = {}  # by group, in order of start
        self._buckets: list[_Bucket] = []  # in order of deadline, because deadlines never decrease
        self._n_finished = 0
        self._scan = _Scan()

    @property
    def waiting(self) -> list[int]:
        """Ids of the groups that were admitted and not trained yet, oldest first."""
        return list(self._waiting)

    @property
    def capacity(self) -> int:
        """How many more groups may start now."""
        steps = self.published + self.max_staleness - self.next_trained + 1
        return max(0, steps * self.batch_size + self.spare - len(self._waiting)) if steps > 0 else 0

    def start(self, group_id: int) -> Admitted:
        """Admit a group at the published version; raises RuntimeError where `capacity` is 0."""
        if not self.capacity:
            raise RuntimeError(f"group {group_id} started although its staleness could exceed {self.max_staleness}")
        deadline = self.published + self.max_staleness
        if not self._buckets or self._buckets[-1].deadline != deadline:
            self._buckets.append(_Bucket(deadline))
        self._waiting[group_id] = bucket = self._buckets[-1]
        bucket.unfinished[group_id] = None
        return Admitted(group_id, deadline)

    def finish(self, group_id: int) -> None:
        """Note that a group can be trained; raises KeyError where it is not waiting for its end."""
        bucket = self._end(group_id)
        bucket.finished.append(group_id)
        self._n_finished += 1

    def drop(self, group_id: int) -> None:
        """Remove an unfinished group, which will not be trained on; raises KeyError where there is none."""
        self._end(group_id)
        del self._waiting[group_id]

    def _end(self, group_id: int) -> _Bucket:
        bucket = self._waiting[group_id]
        del bucket.unfinished[group_id]
        if bucket.deadline <= self._scan.deadline:
            self._scan.unfinished -= 1
        return bucket

    def take(self) -> list[int] | None:
        """Return the ids of the next batch, oldest first, or None while it has to wait for more groups to finish.

        `given_up` has groups that are not trained for it; finished ones only if all others are among them.
        """
        if not self._is_in_time():
            return None
        batch = self._first_finished()
        self.given_up = self._late() if self.spare else []
        for group_id in (*batch, *self.given_up):
            del self._waiting[group_id]
        self._buckets = [bucket for bucket in self._buckets if len(bucket)]
        self._n_finished = sum(len(bucket.finished) for bucket in self._buckets)
        self._scan = _Scan()
        self.next_trained += 1
        return batch

    def _is_in_time(self) -> bool:
        """Return whether a batch has finished, and at most `spare` groups would be late without it.

        With c groups of a deadline of at most d, f of them finished, the batch leaves c - min(f, batch_size) of them,
        and the invariant allows (d - n) * batch_size. As c <= (d - n + 1) * batch_size + spare held before, at
        most `spare` of them are late exactly if at most (d - n) * batch_size + spare are unfinished.
        """
        scan = self._scan
        if self._n_finished < self.batch_size:
            return False
        while not scan.buckets or scan.unfinished <= self._allow(scan.deadline) + self.spare:
            if scan.buckets == len(self._buckets):
                return True
            bucket = self._buckets[scan.buckets]
            scan.buckets += 1
            scan.deadline = bucket.deadline
            scan.unfinished += len(bucket.unfinished)
        return False

    def _allow(self, deadline: int) -> int:
        """Return how many groups may be left after the next step whose deadlines are at most this one."""
        return (deadline - self.next_trained) * self.batch_size

    def _first_finished(self) -> list[int]:
        """Remove the oldest finished groups of their buckets, as many as a batch has."""
        batch: list[int] = []
        for bucket in self._buckets:
            if missing := self.batch_size - len(batch):
                bucket.finished.sort()
                batch += bucket.finished[:missing]
                del bucket.finished[:missing]
        return batch

    def _late(self) -> list[int]:
        """Remove as few groups as possible for the others to be in time after the next step; the unfinished first."""
        late: list[int] = []
        left = 0
        for place, bucket in enumerate(self._buckets):
            left += len(bucket)
            excess = max(0, left - self._allow(bucket.deadline))
            left -= excess
            for before in self._buckets[place::-1] if excess else ():
                while excess and before.unfinished:
                    late.append(before.unfinished.popitem()[0])
                    excess -= 1
            if excess:
                bucket.finished.sort()
                late += bucket.finished[-excess:]
                del bucket.finished[-excess:]
        return late

    def publish(self, version: int) -> None:
        """Note that every server holds `version`: groups that start now are that fresh."""
        self.published = version
