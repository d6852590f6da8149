"""An agent that replaces its history by a summary, which it asks the model for with the real openai client."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest
from scripted import says, session
from test_sessions import ask, assert_exact, talk

from areal_like.algorithms.advantages import estimate
from areal_like.algorithms.batch import join
from areal_like.algorithms.settings import Settings
from areal_like.capabilities.agents.conversation import Continuity
from areal_like.capabilities.agents.session import Session
from areal_like.types import Prompt, Reward

pytestmark = pytest.mark.covers("agents")

SUMMARY = "the file has 3 lines and no tests"
SYSTEM = {"role": "system", "content": "you are an agent"}


async def compacting(client: openai.AsyncOpenAI) -> None:
    """Two turns, a summary of them, and two turns that begin with it."""
    messages: list[Any] = [SYSTEM, {"role": "user", "content": "work"}]
    for said in ("go on", "summarise all this"):
        messages += [await ask(client, messages), {"role": "user", "content": said}]
    summary = (await ask(client, messages)).content.rpartition("</think>")[2].strip()
    messages = [SYSTEM, {"role": "user", "content": f"work\n\nSo far: {summary}"}]
    messages += [await ask(client, messages), {"role": "user", "content": "go on"}]
    await ask(client, messages)


def compacted(summary: str = SUMMARY) -> Session:
    recorded, model = session("plain", says("ls", "cat", summary, "ed", "make"))
    talk(recorded, compacting)
    assert_exact(recorded, model)
    return recorded


@pytest.mark.parametrize("summary", [SUMMARY, f"<think>three lines</think>\n{SUMMARY}"])
def test_the_conversation_behind_a_summary_is_a_branch_of_its_own(summary):
    recorded = compacted(summary)
    kinds = [turn.continuity for turn in recorded.turns]
    assert kinds == [Continuity.FIRST, Continuity.EXACT, Continuity.EXACT, Continuity.COMPACTED, Continuity.EXACT]
    assert recorded.turns[3].follows is recorded.turns[2] and recorded.turns[3].parent is None
    first, second = recorded.trajectories(Prompt(0, []), 0, Reward(1.0))
    assert first.tokens.tolist() == recorded.turns[2].tokens.tolist()
    assert second.tokens.tolist() == recorded.turns[4].tokens.tolist()
    assert [first.reward, second.reward] == [1.0, 1.0]
    assert (second.nodes[0].parent, first.nodes[-1].number) == (2, 2)


def test_a_summary_that_goes_on_in_a_conversation_was_read():
    """The connection closed before the summary was delivered, as far as the server knows."""
    recorded, _ = session("plain", says("ls", "cat", SUMMARY, "ed", "make"))

    async def body(client: openai.AsyncOpenAI) -> None:
        messages: list[Any] = [SYSTEM, {"role": "user", "content": "work"}]
        summary = None
        for _ in range(3):
            message = await ask(client, messages)
            summary = message.content
            messages += [message, {"role": "user", "content": "more"}]
        recorded.turns[-1].delivered = False
        assert len(recorded.orphans) == 1
        await ask(client, [SYSTEM, {"role": "user", "content": f"So far: {summary}"}])

    talk(recorded, body)
    assert not recorded.orphans and recorded.tokens_orphaned == 0
    first, _ = recorded.trajectories(Prompt(0, []), 0, Reward(1.0))
    assert int(first.generated.sum()) == sum(len(turn.response.tokens) for turn in recorded.turns[:3])


def test_later_turns_are_credited_to_the_summary_and_the_turns_before():
    recorded = compacted()
    items = recorded.trajectories(Prompt(0, []), 0, Reward(1.0, turns=(0, 0, 0, 0, 1)))
    experience = join(items, int(items[0].versions.max()))
    assert experience is not None
    advantages = np.asarray(estimate(experience, Settings(turn_discount=0.5), 1000)["advantages"])
    ends = np.flatnonzero(np.diff(experience.batch.fields["loss_mask"], append=0) < 0)
    np.testing.assert_allclose(advantages[ends], [2 / 16, 2 / 8, 2 / 4, 2 / 2, 2])


@pytest.mark.parametrize("said", ["4", "short answer"])
def test_a_short_answer_that_occurs_in_another_conversation_is_not_a_summary(said):
    recorded, _ = session("plain", says(said, "b"))

    async def body(client: openai.AsyncOpenAI) -> None:
        await ask(client, [{"role": "user", "content": "2 + 2"}])
        await ask(client, [{"role": "user", "content": f"another agent, {said}"}])

    talk(recorded, body)
    assert [turn.continuity for turn in recorded.turns] == [Continuity.FIRST, Continuity.BRANCH]


def test_an_answer_that_goes_on_is_not_a_summary_of_its_conversation():
    """A second agent is told what the first one said, which continues: they are two conversations."""
    recorded, _ = session("plain", says(SUMMARY, "ed", "b"))

    async def body(client: openai.AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "work"}]
        messages += [await ask(client, messages), {"role": "user", "content": "go on"}]
        await ask(client, messages)
        await ask(client, [{"role": "user", "content": f"judge this: {SUMMARY}"}])

    talk(recorded, body)
    assert recorded.turns[-1].continuity is Continuity.BRANCH
    assert all(not item.nodes for item in recorded.trajectories(Prompt(0, []), 0, Reward(1.0)))
