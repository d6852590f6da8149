"""An agent of three turns with a reward and a state each, for algorithms that train turns alone."""

from __future__ import annotations

from typing import Any

TURNS = 3


async def run(row: dict[str, Any], client: Any) -> dict[str, Any]:
    """Ask for the answer three times; a turn is rewarded by the digits in it, and starts in the last answer's state."""
    messages = [{"role": "user", "content": row["question"]}]
    rewards, states = [], ["start"]
    for turn in range(TURNS):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        answer = completion.choices[0].message.content or ""
        rewards.append(sum(letter.isdigit() for letter in answer) / (len(answer) + 1))
        states.append("digits" if any(letter.isdigit() for letter in answer) else "none")
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": str(turn)}]
    return {"reward": float(str(row["answer"]) in messages[-2]["content"]), "turns": rewards, "states": states[:TURNS]}
