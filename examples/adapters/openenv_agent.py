"""One episode of an OpenEnv environment (tried with openenv-core 0.3.0), in a Python that has it; see command.py.

    AGENT_COMMAND="/path/to/python examples/adapters/openenv_agent.py URL FIELD"

URL is that of the environment's server. Each observation is a user's turn, as JSON, and each answer of the model the
FIELD of an action. The row's `reset`, if it has one, is what the environment is reset with. The reward is the sum of
the steps'. The episode ends when the environment says so, or at one of the run's limits.
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
