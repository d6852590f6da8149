"""Two attempts at a problem: after a wrong answer the model is asked again. A right second answer earns less."""

from areal_like.rewards.gsm8k import final_answer


async def run(row, client):
    messages = [{"role": "user", "content": row["question"]}]
    for reward in (1.0, 0.5):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        answer = completion.choices[0].message
        if final_answer(answer.content) == final_answer(row["answer"]):
            return reward
        messages += [answer, {"role": "user", "content": row["question"]}]
    return 0.0
