"""Samples that share the first parts of their responses: every part is generated and trained on once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from limits import HUNG_S
from test_episodes import play  # noqa: F401  # a fixture

from areal_like.capabilities.agents.branching import Branching
from areal_like.capabilities.agents.schema import BranchConfig
from areal_like.errors import ServerError
from areal_like.rollout.pool import Response, Sampling
from areal_like.types import FinishReason, Prompt, Reward, Trajectory, generated_in

pytestmark = pytest.mark.covers("shared prompts")
END, PROMPT = 1, [7, 8]


class Pool:
    """Generates the numbers of its tokens; a request whose number is in `short` ends after two of them."""

    def __init__(self, short: Sequence[int] = (), fails_at: int | None = None, hangs_at: int | None = None) -> None:
        self.short, self.fails_at, self.hangs_at = short, fails_at, hangs_at
        self.asked: list[list[int]] = []
        self.seeds: list[int | None] = []
        self.next, self.cancelled, self.running = 100, 0, 0
        self.hangs = asyncio.Event()

    async def sample(self, tokens: Sequence[int], sampling: Sampling, **more: Any) -> Response:
        number = len(self.asked)
        self.asked.append(list(tokens))
        self.seeds.append(more["seed"])
        assert more["session"] == more["priority"] == 5
        self.running += 1
        try:
            await asyncio.sleep(0)
            if number == self.fails_at:
                raise ServerError("no answer")
            if number == self.hangs_at:
                self.hangs.set()
                await asyncio.Event().wait()
        finally:
            self.running -= 1
        n = min(2, sampling.max_new_tokens) if number in self.short else sampling.max_new_tokens
        said = np.arange(self.next, self.next + n, dtype=np.int32)
        self.next += n
        reason = FinishReason.LENGTH
        if number in self.short:
            said[-1], reason = END, FinishReason.STOP
        return Response(said, -said.astype(np.float32), np.full(n, number, np.int32), reason)

    def end_session(self, session: object) -> None: ...

    def cancel(self, responses: Sequence[Response]) -> None:
        self.cancelled += sum(len(each.tokens) for each in responses)


def group(pool: Pool, after: list[int], n: int, missing: Sequence[int] = (), **more: Any) -> list[Trajectory]:
    """The trajectories of group 5, whose rewards are 0, 1, ... or missing."""

    async def score(prompt: Prompt, responses: Sequence[Any]) -> list[Reward]:
        return [Reward(None if i in missing else float(i)) for i in range(len(responses))]

    workflow = Branching(cast(Any, pool), cast(Any, score), Sampling(6), n, BranchConfig(after=after), **more)
    return asyncio.run(asyncio.wait_for(workflow(Prompt(0, PROMPT), 5), HUNG_S))


def check_tree(items: Sequence[Trajectory], pool: Pool) -> None:
    """Each generated token is trained on once, and samples share what their nodes say."""
    trained = Counter(token for item in items for token in item.tokens[item.generated].tolist() if token != END)
    generated = [token for token in range(100, pool.next) if any(token in item.tokens for item in items)]
    assert trained == Counter(generated)
    by_node: dict[int, set[tuple[int, ...]]] = {}
    for item in items:
        assert item.tokens[: len(PROMPT)].tolist() == PROMPT and item.nodes[-1].end == len(item.tokens)
        for node in item.nodes:
            by_node.setdefault(node.number, set()).add(tuple(item.tokens[: node.end].tolist()))
        said = item.generated & (item.tokens != END)
        np.testing.assert_array_equal(item.logprobs[said], -item.tokens[said].astype(np.float32))
    assert all(len(paths) == 1 for paths in by_node.values())


def test_a_group_is_a_tree_whose_parts_are_trained_once():
    pool = Pool()
    items = group(pool, [2, 4], 8)
    assert len(pool.asked) == 2 + 4 + 8
    assert [item.sample for item in items] == list(range(8)) and [item.reward for item in items] == list(range(8))
    assert {len(item.tokens) for item in items} == {8}
    assert sorted(len(item.nodes) for item in items) == [3] * 8
    assert [int(item.generated.sum()) for item in items] == [6, 2, 4, 2, 6, 2, 4, 2]
    assert [item.nodes[0].number == items[0].nodes[0].number for item in items] == [True] * 4 + [False] * 4
    check_tree(items, pool)
    for item in items:  # versions are those of the requests that generated the tokens
        assert (np.diff(item.versions[item.generated]) >= 0).all()


def test_a_response_that_ends_early_is_one_sample():
    pool = Pool(short=[0])
    items = group(pool, [3], 4)
    assert [len(item.tokens) for item in items] == [4, 8, 8]
    assert [len(item.nodes) for item in items] == [1, 2, 2]
    assert items[0].finish_reason is FinishReason.STOP
    check_tree(items, pool)


def test_what_is_shared_is_trained_on_with_a_sample_that_has_a_reward():
    items = group(pool := Pool(), [3], 2, missing=[0])
    assert [(item.sample, item.reward, int(item.generated.sum())) for item in items] == [(1, 1.0, 6), (0, None, 3)]
    check_tree(items, pool)


def test_seeds_depend_on_the_place_in_the_tree():
    seeds = [sorted(map(str, (group(pool := Pool(), [2], 4, seed=seed), pool.seeds)[1])) for seed in (3, 3, 4)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert len(set(seeds[0])) == 2 + 4


def test_nothing_runs_on_after_a_failure():
    pool = Pool(fails_at=3)
    with pytest.raises(ServerError):
        group(pool, [2], 4)
    assert pool.running == 0


def test_what_a_cancelled_group_has_generated_is_counted():
    async def run() -> None:
        pool = Pool(hangs_at=4)
        workflow = Branching(cast(Any, pool), cast(Any, None), Sampling(6), 4, BranchConfig(after=[2]))
        task = asyncio.create_task(workflow(Prompt(0, PROMPT), 5))
        await pool.hangs.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.running == 0
        assert pool.cancelled == pool.next - 100

    asyncio.run(run())


AGENT = """
TURNS = {turns}

async def run(row, client):
    messages = [{{"role": "user", "content": row["question"]}}]
    for turn in range(TURNS):
        made = await client.chat.completions.create(model="policy", messages=messages)
        messages.append({{"role": "assistant", "content": made.choices[0].message.content}})
        messages.append({{"role": "user", "content": f"turn {{turn}}"}})
    {end}
"""


def branching(after: list[int]) -> tuple[str, str]:
    return f"rollout.branch={{after: {after}}}", "episode.max_tokens=1000"


def agent(turns: int = 3, end: str = "return 1.0") -> str:
    return AGENT.format(turns=turns, end=end)


def test_episodes_share_their_first_turns(play):  # noqa: F811
    """Two branching points, behind turns 1 and 2 of 3: 1 + 2 + 4 turns are generated in place of 12."""
    from test_episodes import Pool as Answers

    pool = Answers()
    (items,), said, counts = play(agent(), *branching([1, 2]), pool=pool, n=4)
    assert not said and counts["done"] == 4
    assert len(pool.asked) == 7
    assert sorted(item.sample for item in items) == [0, 1, 2, 3]
    assert sum(generated_in([item]) for item in items) == sum(len(each.tokens) for each in pool.answered)
    assert not pool.aside["unused"]
    numbers = [[node.number for node in item.nodes] for item in sorted(items, key=lambda item: item.sample)]
    assert [len({*map(tuple, (path[:k] for path in numbers))}) for k in (1, 2, 3)] == [1, 2, 4]
    assert numbers[0][:2] == numbers[1][:2] and numbers[2][:2] == numbers[3][:2]
    for item in items:
        assert item.generated.any() and len(item.nodes) == 3


def test_an_agent_that_does_otherwise_shares_less(play):  # noqa: F811
    """The second message has a random text, so episodes share the first turn alone, whatever the key says."""
    from test_episodes import Pool as Answers

    source = agent().replace('f"turn {turn}"', "__import__('secrets').token_hex()")
    pool = Answers()
    (items,), _, counts = play(source, *branching([2]), pool=pool, n=2)
    assert counts["done"] == 2
    assert len(pool.asked) == 3 + 2
    first, second = sorted(items, key=lambda item: item.sample)
    assert first.nodes[0].number == second.nodes[0].number and first.nodes[1].number != second.nodes[1].number


def test_an_episode_that_ends_before_the_branching_point_has_no_branches(play):  # noqa: F811
    (items,), _, counts = play(agent(turns=1), *branching([1]), n=4)
    assert [item.sample for item in items] == [0, 2]
    assert counts["done"] == 2


def test_episodes_share_nothing_with_one_that_failed_before(play):  # noqa: F811
    """The first episode fails before its second turn; the others of its tree are played from the start."""
    failing = agent(turns=1, end="raise ValueError('broken')")
    (items,), _, counts = play(failing, *branching([2]), "episode.max_failed_share=1", n=2)
    assert counts == {"raised": 2}
    assert [item.reward for item in items] == [None, None]


def test_what_is_shared_is_trained_on_where_an_episode_has_a_reward(play):  # noqa: F811
    """The first episode fails behind the branching point, in which the other has the reward."""
    source = agent(turns=2, end="import os; p = row['answer']; raise ValueError('x')")
    source = source.replace(
        "import os; p = row['answer']; raise ValueError('x')",
        "await asyncio.sleep(0)\n    global PLAYED\n    PLAYED = globals().get('PLAYED', 0) + 1\n"
        "    if PLAYED == 1:\n        raise ValueError('broken')\n    return 1.0",
    )
    (items,), _, counts = play(source, *branching([1]), "episode.max_failed_share=1", n=2)
    assert counts["done"] + counts["raised"] == 2
    trained = {item.reward: int(item.generated.sum()) for item in items}
    assert trained[1.0] > trained[None]
