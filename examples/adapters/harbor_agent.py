"""Run one trial of a Harbor task (tested with harbor 0.24.0) in a Python environment that has Harbor; see command.py.

    AGENT_COMMAND="/path/to/python examples/adapters/harbor_agent.py AGENT [ENVIRONMENT]"

AGENT is one of Harbor's agents that use OpenAI's or Anthropic's API, such as `terminus-2`, or `package.module:Class`.
ENVIRONMENT has the same form; the default is `docker`. `task` in the row is the directory of the task. If the agent is
installed in the task's container, the container must be able to reach the run's servers. The reward is the verifier's;
several rewards are averaged.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

# for agents in the task's container; those beside it find the same variables here
SERVERS = {name: value for name, value in os.environ.items() if name.startswith(("OPENAI_", "ANTHROPIC_"))}


def named(choice, key):
    return {"import_path" if ":" in choice else key: choice}


async def play(agent, environment, task):
    with tempfile.TemporaryDirectory() as trials:
        config = TrialConfig(
            task=TaskConfig(path=Path(task)),
            trials_dir=Path(trials),
            agent=AgentConfig(**named(agent, "name"), model_name="openai/policy", env=SERVERS),
            environment=EnvironmentConfig(**named(environment, "type")),
        )
        result = await (await Trial.create(config)).run()
    if result.verifier_result is None:
        raise RuntimeError(f"the trial has no reward: {result.exception_info}")
    return statistics.mean(result.verifier_result.rewards.values())


print(asyncio.run(play(sys.argv[1], (*sys.argv, "docker")[2], json.load(sys.stdin)["task"])))
