"""Tools of MCP servers (`episode.mcp_servers`); the reward is 1 if the last answer has the number of the row's.

Requires `episode.tool_call_parser`, such as `qwen25`, and the package `mcp`.
"""

from areal_like.rewards.gsm8k import final_answer


async def run(row, client, tools):
    messages = [{"role": "user", "content": row["question"]}]
    functions = await tools.list()
    for _ in range(4):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=functions)
        answer = completion.choices[0].message
        messages.append(answer)
        for call in answer.tool_calls or ():
            result = await tools.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result.text})
        if not answer.tool_calls:
            break
    return float(final_answer(answer.content or "") == final_answer(row["answer"]))
