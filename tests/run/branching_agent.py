"""Agents whose turns branch and have sampling settings of their own, as episodes and as a group."""

from __future__ import annotations

import asyncio
from typing import Any

from areal_like.core.types import Prompt, Trajectory

SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.8}, {"top_p": 0.9}, {"extra_body": {"top_k": 5}}, {})


async def run(row: dict[str, Any], client: Any) -> float:
    """Ask twice after the same first answer, once more after the second one, and another agent about that."""
    return share(await converse(row["question"], client))


async def play(prompt: Prompt, n: int, rollout: Any) -> list[Trajectory]:
    """Do the same in `n` recorded conversations."""

    async def one() -> list[Trajectory]:
        async with rollout.record() as agent:
            reward = share(await converse(prompt.row["question"], agent.client))
            return list(agent.trajectories(reward))

    return [item for game in await asyncio.gather(*(one() for _ in range(n))) for item in game]


async def converse(question: str, client: Any) -> list[str]:
    """Return the answers."""
    user = {"role": "user", "content": question}
    first = await ask(client, [user], SETTINGS[0])
    begun = [user, first]
    await ask(client, [*begun, {"role": "user", "content": "1"}], SETTINGS[1])
    second = [*begun, {"role": "user", "content": "2"}]
    second.append(await ask(client, second, SETTINGS[2]))
    third = await ask(client, [*second, {"role": "user", "content": "3"}], SETTINGS[3])
    other = await ask(client, [{"role": "user", "content": "4"}], SETTINGS[1])
    return [answer["content"] for answer in (first, second[-1], third, other)]


async def ask(client: Any, messages: list[dict[str, str]], settings: dict[str, Any]) -> dict[str, str]:
    """Return the assistant's message."""
    completion = await client.chat.completions.create(model="policy", messages=messages, **settings)
    return {"role": "assistant", "content": completion.choices[0].message.content}


def share(answers: list[str]) -> float:
    """Return the share of one digit, which a model without any training gets in part."""
    text = "".join(answers)
    return text.count("1") / max(1, len(text))
