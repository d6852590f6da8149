"""Which samples wait for another's prefill."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_like.rollout.sglang.patches.one_prefill import MOST_PASSES, followers, gathers


@dataclass
class Request:
    origin_input_ids: list[int]
    extra_key: str = "@1"
    output_ids: list[int] = field(default_factory=list)


def test_all_but_the_first_of_a_prompt_wait_until_it_is_in_the_cache() -> None:
    one, same, other, third = (Request(prompt) for prompt in ([1, 2], [1, 2], [1, 3], [1, 2]))
    waiting = [one, same, other, third]
    assert [id(request) for request in followers(waiting, lambda request: False)] == [id(same), id(third)]
    assert followers(waiting, lambda request: request.origin_input_ids == [1, 2]) == []


def test_equal_prompts_of_different_versions_do_not_wait_for_each_other() -> None:
    assert followers([Request([1, 2]), Request([1, 2], extra_key="@2")], lambda request: False) == []


def test_a_retracted_request_neither_waits_nor_is_waited_for() -> None:
    retracted = Request([1, 2], output_ids=[3])
    assert followers([retracted, Request([1, 2]), retracted], lambda request: False) == []


def test_the_cache_is_asked_once_for_each_prompt() -> None:
    asked: list[Request] = []
    followers([Request([1]), Request([2]), Request([1]), Request([1])], lambda request: bool(asked.append(request)))
    assert [request.origin_input_ids for request in asked] == [[1]]


def test_requests_that_come_one_at_a_time_gather_behind_running_ones() -> None:
    assert gathers(waiting=5, running=100, passes=0)
    assert not gathers(waiting=10, running=100, passes=0)
    assert not gathers(waiting=5, running=100, passes=MOST_PASSES)


def test_few_running_requests_keep_none_waiting() -> None:
    assert not any(gathers(waiting=1, running=running, passes=0) for running in range(20))
    assert not gathers(waiting=0, running=1000, passes=0)
