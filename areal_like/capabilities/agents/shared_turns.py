"""Episodes of one group that start with the same turns (`rollout.branch`).

An agent cannot be copied in the middle of an episode. Instead it runs again from the start, and a request that equals a
shared turn's request gets the turn's answer, which is not generated again. If the environment answers differently, the
shared part ends early: the first different request is generated, and so are all later ones.
"""

import asyncio
from collections.abc import Sequence

from areal_like.capabilities.agents.schema import BranchConfig
from areal_like.capabilities.agents.session import Session
from areal_like.capabilities.agents.turn import Turn

type Shared = Sequence[tuple[object, Turn]]
"""Requests and the turns that answered them."""


class SharedTurns:
    """The plan of which episodes of a group start with turns of which others, and when.

    Episode i branches from the episode whose number is i with the last nonzero digit, in base `width`, set to 0, at the
    branching point of that digit. It starts when that episode requests the next turn, so that all shared answers have
    been read. It does not run if the other episode ended before, and shares nothing if the other failed before.
    """

    def __init__(self, branch: BranchConfig, home: asyncio.AbstractEventLoop) -> None:
        self._branch, self._home = branch, home
        self._begun: dict[tuple[int, int], asyncio.Future[Shared | None]] = {}
        self._given: dict[int, Shared] = {}  # own turns shared with others, by episode
        self._ended: dict[int, Shared | None] = {}

    def source_of(self, episode: int) -> tuple[int, int] | None:
        """Return the episode whose first turns `episode` shares, and how many; None for a root."""
        step = 1
        for turns in reversed(self._branch.after):
            digit = episode // step % self._branch.width
            if digit:
                return episode - digit * step, turns
            step *= self._branch.width
        return None

    async def wait(self, episode: int) -> Shared | None:
        """Wait for the turns with which an episode starts; return None if it does not run."""
        if (source := self.source_of(episode)) is None:
            return ()
        if source[0] in self._ended and source not in self._begun:
            return self._ended[source[0]]
        return await self._begun.setdefault(source, self._home.create_future())

    def given_by(self, episode: int) -> Shared:
        """Return the turns that an episode shared with others, which it must keep when it runs again."""
        return self._given.get(episode, ())

    def watch(self, episode: int, session: Session) -> None:
        """Start other episodes when the session requests a turn after a branching point; in any thread."""

        attempts = session.attempts  # a closure over the session itself would be a cycle

        def note() -> None:
            answered = attempts.answers()
            read = [(asked, turn) for asked, turn in answered if not turn.is_orphan]
            self._home.call_soon_threadsafe(self._begin_others, episode, read)

        session.on_request = note

    def end(self, episode: int, *, failed: bool) -> None:
        """Record the end of an episode: waiting episodes do not run, or share nothing."""
        self._ended[episode] = () if failed else None
        for (source, _), begun in self._begun.items():
            if source == episode and not begun.done():
                begun.set_result(self._ended[episode])

    def _begin_others(self, episode: int, read: Shared) -> None:
        for turns in self._branch.after:
            if len(read) < turns or episode in self._ended:
                return
            begun = self._begun.setdefault((episode, turns), self._home.create_future())
            if not begun.done():
                begun.set_result(read[:turns])
                self._given[episode] = max(self.given_by(episode), read[:turns], key=len)
