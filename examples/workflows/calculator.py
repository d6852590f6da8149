"""A calculator tool: the model may call it before it answers. Requires `episode.tool_call_parser`, such as `qwen25`."""

import json
import operator

from areal_like.rewards.gsm8k import final_answer

NUMBER, OPERATOR = {"type": "number"}, {"enum": ["+", "-", "*", "/"]}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "operator": OPERATOR, "b": NUMBER}}
TOOLS = [{"type": "function", "function": {"name": "calculate", "parameters": PARAMETERS}}]
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def calculate(arguments):
    try:
        given = json.loads(arguments)
        return f"{OPERATORS[given['operator']](float(given['a']), float(given['b'])):.12g}"
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        return f"error: {error}"


async def run(row, client):
    messages = [{"role": "user", "content": row["question"]}]
    for _ in range(3):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        answer = completion.choices[0].message
        messages.append(answer)
        for call in answer.tool_calls or ():
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not answer.tool_calls:
            break
    return float(final_answer(answer.content or "") == final_answer(row["answer"]))
