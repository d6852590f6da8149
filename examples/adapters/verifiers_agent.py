"""Run one episode of a `verifiers` environment (v1, tested with 0.4.0) in a Python environment that has it.

    AGENT_COMMAND="/path/to/python examples/adapters/verifiers_agent.py TASKSET"

See command.py. TASKSET is a taskset of verifiers: the id of a package, or `openenv` or `harbor`, whose tasks it
supports too. `task` in the row is the number of the task. VERIFIERS_RUNTIME selects where the agent runs: `subprocess`
or `docker`. Most agents of verifiers use tools: set `episode.tool_call_parser`.
"""

import asyncio
import itertools
import json
import os
import sys

import verifiers.v1 as vf


async def play(taskset, row):
    agent = {"runtime": {"type": os.environ.get("VERIFIERS_RUNTIME", "subprocess")}}
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": taskset}, agent=agent))
    task = next(itertools.islice(env.taskset, row["task"], None))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        return await env.run_episode(task, vf.ModelContext("policy", client))


episode = asyncio.run(play(sys.argv[1], json.load(sys.stdin)))
if not episode.ok:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    sys.exit("the episode failed: " + "; ".join(error.message for error in errors))
print(episode.traces[0].reward)
