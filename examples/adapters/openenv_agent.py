"""Run one episode of an OpenEnv environment (tested with openenv-core 0.3.0) in a Python environment that has it.

    AGENT_COMMAND="/path/to/python examples/adapters/openenv_agent.py URL FIELD"

See command.py. URL is the address of the environment's server. Each observation is a user turn, as JSON, and each
answer of the model is the FIELD of an action. The environment is reset with `reset` of the row, if the row has it. The
reward is the sum of the rewards of all steps. The episode ends when the environment ends it, or at a limit of the run.
"""

import asyncio
import json
import sys

from openai import AsyncOpenAI
from openenv import GenericAction, GenericEnvClient


async def play(url, field, row):
    messages, reward = [], 0.0
    async with GenericEnvClient(base_url=url) as env, AsyncOpenAI() as model:
        result = await env.reset(**(row.get("reset") or {}))
        while not result.done:
            messages.append({"role": "user", "content": json.dumps(result.observation)})
            completion = await model.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": completion.choices[0].message.content})
            result = await env.step(GenericAction(**{field: messages[-1]["content"]}))
            reward += result.reward or 0.0
    return reward


print(asyncio.run(play(*sys.argv[1:], json.load(sys.stdin))))
