"""Two agents of one model: one knows the answer and gives a hint, the other guesses. Each has its own reward."""

import asyncio

from areal_like.rewards.gsm8k import final_answer


async def run(prompt, n, rollout):
    games = await asyncio.gather(*(play(prompt.row, rollout) for _ in range(n)))
    return [trajectory for game in games for trajectory in game]


async def play(row, rollout):
    async with rollout.record() as knowing, rollout.record() as guessing:
        hint = await say(knowing.client, f"{row['question']} {row['answer']}")
        guess = await say(guessing.client, f"{row['question']} {hint}")
        right = final_answer(guess) == final_answer(row["answer"])
        told = final_answer(hint) == final_answer(row["answer"])  # a hint that is the answer spoils the game
        return knowing.trajectories(float(right and not told)) + guessing.trajectories(float(right))


async def say(client, text):
    completion = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
    return completion.choices[0].message.content
