"""Which groups may start, and which are trained next, so that no trajectory is ever staler than η.

A group that starts while the servers hold version v may hold tokens of version v, so it has the deadline v + η: the
last version at which it may be trained. Each training step takes `batch_size` finished groups. The invariant, with n
the version that the next step trains and d[0] <= d[1] <= ... the deadlines of the groups that wait for training:

    d[j] >= n + j // batch_size        for every j

so training in order of deadline always meets every deadline. A group starts only if the invariant still holds with it,
and a step may take finished groups ahead of slow ones only if it holds for what stays. Hence a slow group delays a step
at its deadline at the latest, and nothing is ever discarded for its age. With η = 0 this is synchronous training.

A group that the algorithm does not want (`drop`) leaves its place to a new one: what waits behind it moves up, which
only loosens the invariant.

With `spare` groups, so many more may start than the invariant allows. A step then takes the first `batch_size` groups
that have finished and gives up as few others as the invariant asks for, unfinished ones first, if `spare` are enough:
it does not wait for the slow, which is quick, and has trained on fewer long responses than the data would give.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Admitted:
    """A group that was let in: its id and the last version at which it may be trained."""

    group_id: int
    deadline: int


class Admission:
    """The bookkeeping of a run that begins with `version`; the module's docstring states its invariant."""

    def __init__(self, batch_size: int, max_staleness: int, version: int = 0, spare: int = 0) -> None:
        if batch_size < 1 or max_staleness < 0:
            raise ValueError(f"batch_size {batch_size} must be at least 1, max_staleness {max_staleness} at least 0")
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.spare = spare
        self.given_up: list[int] = []  # ids of groups that the last batch was taken without waiting for
        self.published = version  # what every server holds
        self.next_trained = version  # the version at which the next batch will be trained
        self._waiting: list[Admitted] = []  # in order of deadline, because deadlines never decrease

    @property
    def waiting(self) -> list[int]:
        """Ids of the groups that were let in and not trained yet, oldest first."""
        return [group.group_id for group in self._waiting]

    @property
    def capacity(self) -> int:
        """How many more groups may start now."""
        steps = self.published + self.max_staleness - self.next_trained + 1
        return max(0, steps * self.batch_size + self.spare - len(self._waiting)) if steps > 0 else 0

    def start(self, group_id: int) -> Admitted:
        """Let a group start at the published version; raises RuntimeError where `capacity` is 0."""
        if not self.capacity:
            raise RuntimeError(f"group {group_id} started although its staleness could exceed {self.max_staleness}")
        admitted = Admitted(group_id, self.published + self.max_staleness)
        self._waiting.append(admitted)
        return admitted

    def drop(self, group_id: int) -> None:
        """A group will not be trained on; raises KeyError where it does not wait."""
        rest = [group for group in self._waiting if group.group_id != group_id]
        if len(rest) == len(self._waiting):
            raise KeyError(group_id)
        self._waiting = rest

    def take(self, finished: Collection[int]) -> list[int] | None:
        """Ids of the next batch, oldest first, or None while it has to wait for more groups to finish.

        `given_up` has those that are not trained for it; finished ones are among them only where all others are.
        """
        if len(finished) < self.batch_size:  # it is asked for at every group that ends, of thousands
            return None
        ready = [group for group in self._waiting if group.group_id in finished][: self.batch_size]
        taken = {group.group_id for group in ready}
        rest = [group for group in self._waiting if group.group_id not in taken]
        if len(ready) < self.batch_size or (late := self._late(rest, finished)) is None:
            return None
        given_up = set(late)
        self._waiting = [group for group in rest if group not in given_up]
        self.given_up = [group.group_id for group in late]
        self.next_trained += 1
        return [group.group_id for group in ready]

    def _late(self, rest: Sequence[Admitted], finished: Collection[int]) -> list[Admitted] | None:
        """As few groups as possible without which the `rest` is in time after the next step; the unfinished first.

        None where they are more than `spare`.
        """
        late: list[Admitted] = []
        unfinished: list[Admitted] = []  # of those before, without the late
        for place, group in enumerate(rest):
            if group.group_id not in finished:
                unfinished.append(group)
            if group.deadline < self.next_trained + 1 + (place - len(late)) // self.batch_size:
                late.append(unfinished.pop() if unfinished else group)
                if len(late) > self.spare:
                    return None
        return late

    def publish(self, version: int) -> None:
        """Every server holds `version` now: groups that start from here on are that fresh."""
        self.published = version
