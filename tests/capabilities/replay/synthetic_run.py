"""A run with real trainers and the loop, whose responses are random tokens instead of a server's.

`python synthetic_run.py FILEROOT [key=value ...]`: every response is scored by the trainer with the weights of its
version, and groups wait for training as those of servers do, so that the batches are asynchronous. A model with experts
gets random routes, as the trainer follows any.
"""

import asyncio
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from areal_like.backends.ray.run import run_cluster
from areal_like.capabilities.replay.recorder import make_recorder
from areal_like.capability import Started
from areal_like.core.algorithms.batch import batch_of
from areal_like.core.config.load import load
from areal_like.core.loop.evaluation import Evaluator
from areal_like.core.loop.loop import Parts, reinforce
from areal_like.core.loop.policies import Policy
from areal_like.core.loop.step import Models
from areal_like.core.rollout.admission import Admission
from areal_like.core.rollout.collector import Collector
from areal_like.core.trainer.remote import Trainer
from areal_like.core.types import FinishReason, Prompt, Trajectory
from areal_like.job import Job
from areal_like.launch import check
from areal_like.metrics.console import View
from areal_like.run.collecting import plain_stream
from areal_like.run.directory import RunDirectory, run_directory
from areal_like.run.model_files import model_directories
from areal_like.run.recording import make_record, recording
from areal_like.run.startup import StartupTimes, ready_trainers, saved_trainers

CONFIG = Path(__file__).parents[3] / "examples/math/gsm8k_grpo_cpu.yaml"
SMALL = (
    *("experiment_name=test", "trial_name=run", "recover.mode=auto", "recover.replay=true", "warm_start=null"),
    *("train_dataset.batch_size=2", "train_dataset.arithmetic.size=16", "valid_dataset.arithmetic.size=8"),
    *("gconfig.n_samples=3", "rollout.max_head_offpolicyness=2", "evaluator.freq_steps=null"),
    *("evaluator.at_start=false", "evaluator.at_end=false", "rollout.max_logprob_diff=9", "stats_logger.console=false"),
    *("actor.init_model.num_hidden_layers=2", "actor.init_model.hidden_size=64", "saver.freq_steps=null"),
    *("actor.init_model.intermediate_size=64", "actor.use_decoupled_loss=true", "scheduler.startup_timeout_s=1500"),
    f"reward.function={Path(__file__).with_name('hashed_reward.py')}:score",  # of evaluations in a replay
)


class Servers:
    """What stands for servers: `send` takes the weights, and scores the responses of their version."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self._job, self._trainer, self._version = job, trainer, 0
        self._ready: list[Trajectory] = []
        self._delays = random.Random(0)

    async def send(self, version: int, deadline: Any) -> None:
        """Generate as many responses as could be admitted with a version."""
        config, rng = self._job.config, np.random.default_rng([config_seed(self._job), version])
        count = config.train_dataset.batch_size * config.gconfig.n_samples * (config.rollout.max_head_offpolicyness + 2)
        made = [self._draw(rng, version) for _ in range(count)]
        scored = await self._trainer.log_probs(batch_of(made, version), config.gconfig.temperature)
        ends = np.cumsum([len(item.tokens) for item in made])[:-1]
        parts = np.split(scored, ends)
        self._ready = [replace(item, logprobs=part) for item, part in zip(made, parts, strict=True)]

    def _draw(self, rng: np.random.Generator, version: int) -> Trajectory:
        length = int(rng.integers(8, 24))
        tokens = rng.integers(3, 13, length).astype(np.int32)
        versions = np.where(np.arange(length) < 4, -1, version).astype(np.int32)
        columns = {"routes": draw_routes(rng, length, model)} if (model := self._job.models["actor"]).experts else {}
        return Trajectory(
            *(0, 0, tokens, np.zeros(length, np.float32), versions, FinishReason.STOP, float(rng.random())),
            columns=columns,
        )

    async def workflow(self, prompt: Prompt, group_id: int) -> list[Trajectory]:
        """Return the responses of a group after a while."""
        ready = [self._ready.pop() for _ in range(self._job.config.gconfig.n_samples)]
        await asyncio.sleep(self._delays.random() * 0.3)
        own = {"sample_id": prompt.sample_id, "group_id": group_id}
        return [replace(item, **own, sample=sample) for sample, item in enumerate(ready)]


def draw_routes(rng: np.random.Generator, tokens: int, model: Any) -> Any:
    """Different experts for each token in each layer."""
    order = np.argsort(rng.random((tokens, model.layers, model.experts)), axis=-1)
    return order[..., : model.experts_per_token].astype(np.uint8)


def config_seed(job: Job) -> int:
    """The run's seed."""
    return job.config.seed


async def run(job: Job) -> None:
    """Execute a run, or resume it."""
    view = View(enabled=False)
    async with run_directory(job, view, partial(make_record, job, view)) as opened:
        with recording(opened.record):
            models = await model_directories(job.config, job.config.run_dir)
            plan = replace(job.plan, engines=tuple(each for each in job.plan.engines if each.kind == "trainer"))
            async with run_cluster(
                job.config.scheduler,
                plan,
                uses_gpus=job.device == "cuda",
                log_dir=job.config.run_dir / "logs",
                shared_dir=job.config.run_dir / ".weights",
                lock=opened.lock,
            ) as cluster:
                ready = await ready_trainers(cluster, job, models, opened, view, StartupTimes())
                known = Models(ready.reference, ready.roles.get("critic"))
                await train(job, opened, ready.roles, known, cluster.shared_dir)


async def train(job: Job, opened: RunDirectory, trainers: Any, models: Models, shared_dir: Path) -> None:
    """Train on synthetic responses with the real loop."""
    config, state, trainer = job.config, opened.state, trainers["actor"]
    servers = Servers(job, trainer)
    await servers.send(state.version, None)
    recovery = opened.recovery(config, saved_trainers(config, trainers))
    nothing = cast(Any, None)
    resumed = state.version if opened.checkpoint else None
    started = Started(
        job=job, jobs={"": job}, policies={"": trainer}, trainers=trainers, pool=nothing, sync=nothing, teacher=None,
        record=opened.record, recovery=recovery, shared_dir=shared_dir, on_nodes=nothing, resumed=resumed, say=print,
    )  # fmt: skip
    async with asyncio.TaskGroup() as groups:
        batch_size, steps = config.train_dataset.batch_size, job.steps
        collector = Collector(
            prompts=plain_stream(job),
            groups=steps * batch_size,
            workflow=servers.workflow,
            admission=Admission(batch_size, config.rollout.max_head_offpolicyness, state.version),
            max_groups=None,
            tasks=groups,
            again=state.untrained,
            started=state.started,
            dropped=state.count_dropped(batch_size),
            tokens_generated=state.tokens_generated,
        )
        rewards = cast(Any, type("Rewards", (), {"statistics": lambda self: {}})())
        parts = Parts(
            {"": Policy("", config, job.algorithm, trainer, rewards)},
            cast(Any, servers),
            collector,
            Evaluator(config.evaluator, {}),
            models=models,
            hooks=[hook for hook in [make_recorder(started)] if hook],
            recovery=recovery,
        )
        await reinforce(config, parts, steps, opened.record, state if opened.checkpoint else None)


if __name__ == "__main__":
    place = f"cluster.fileroot={sys.argv[1]}"
    asyncio.run(run(check(load(CONFIG, [*SMALL, place, *sys.argv[2:]]))))
