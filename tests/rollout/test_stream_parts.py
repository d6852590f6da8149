"""Events of a stream are the same wherever the network cuts it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from areal_like.backends.http import take_events

EVENTS = [b'{"index":0}', b'{"index":1,"text":"a b"}', b'{"index":0,"end":true}']
STREAM = b"".join(b"data: %b\n\n" % event for event in [*EVENTS, b"[DONE]"])


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_events_are_complete_and_in_order(cuts: set[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    rest: list[bytes] = []
    found = [event for start, end in pairwise(places) for event in take_events(rest, STREAM[start:end])]
    assert found == EVENTS
    assert rest == []


def test_parts_of_an_event_are_kept_as_they_are_until_it_ends() -> None:
    rest: list[bytes] = []
    parts = [b"data: [", *[b"1," * 1000] * 100, b"1]"]
    assert not any(take_events(rest, part) for part in parts)
    assert rest == parts  # joining them at each part would take the square of their number
    assert take_events(rest, b"\n\n") == [b"".join(parts)[len(b"data: ") :]]
