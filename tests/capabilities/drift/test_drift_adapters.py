"""With several adapters, servers and trainer are compared by the adapter of each response."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from running import CONFIG
from test_drift import LIMIT, FakeServer, Fault, Scene, added, responses

from areal_like.capabilities.drift.alarm import LogprobDrift
from areal_like.capabilities.drift.hook import DriftHook, make_hook
from areal_like.config.load import load
from areal_like.preflight import preflight
from areal_like.routes import Routes
from areal_like.run import loop
from areal_like.run.loop import Parts
from areal_like.run.policies import Policy
from areal_like.types import Ints

pytestmark = pytest.mark.covers("drift alarm", "LoRA")

OFF = 0.3
CONFIGURATION = load(CONFIG).config


class AdapterServer(FakeServer):
    """A server with a fault of its own in each adapter."""

    def __init__(self, faults: dict[str | None, Fault]) -> None:
        super().__init__("server 0")
        self.faults = faults
        self.asked: set[str | None] = set()

    async def token_scores(
        self, tokens: Ints, timeout_s: float, *, adapter: str | None = None, **more: Any
    ) -> tuple[np.ndarray, Routes | None]:
        self.asked.add(adapter)
        self.fault = self.faults.get(adapter)
        return await super().token_scores(tokens, timeout_s, **more)


async def step(scenes: dict[str, Scene], version: int) -> dict[str, float]:
    """A step of the loop on responses of both adapters; returns the distances of its probes."""
    batch = responses(group=2)  # and one of group 3, which is the second adapter's

    async def next_batch() -> list[Any]:
        return batch

    unused: Any = SimpleNamespace(next_batch=next_batch)
    record: Any = SimpleNamespace(phase=lambda name: nullcontext())
    policies = {name: Policy(name, CONFIGURATION, unused, cast(Any, scene), unused) for name, scene in scenes.items()}
    hook = DriftHook({name: scene.alarm for name, scene in scenes.items()}, record)
    parts = Parts(policies, unused, unused, unused, hooks=[hook])
    trained = await loop._next_step(parts, version, record, None)
    assert trained
    stats = await loop._train(parts, trained, record)
    assert stats["math/logprob_diff"] == stats["code/logprob_diff"] == 0
    return trained.measured


@pytest.fixture
def trained(monkeypatch):
    async def train_step(*_: Any) -> dict[str, float]:
        return {"tokens": 1.0, "logprob_diff": 0.0}

    monkeypatch.setattr(loop, "train_step", train_step)


def test_the_adapter_that_drifts_is_named_and_ends_the_run(trained):
    server = AdapterServer({"code": added(OFF)})
    scenes = {name: Scene([server], "rollout.drift_patience=2", adapter=name) for name in ("math", "code")}

    async def run() -> None:
        probed = await step(scenes, 0)
        assert probed["math/logprob_diff_probe"] < LIMIT
        assert probed["code/logprob_diff_probe"] == pytest.approx(OFF, rel=1e-3) == probed["logprob_diff_probe"]
        with pytest.raises(LogprobDrift, match="different log-probs of the adapter code at version 0 to 1: "):
            await step(scenes, 1)

    asyncio.run(run())
    assert server.asked == {"math", "code"}
    assert scenes["math"].said == []
    assert [text for text in scenes["code"].said if "of the adapter code at version 0: " in text]


def test_adapters_alone_are_compared_by_what_a_server_held_before(trained):
    """Checksums of merged weights are not those of what is sent."""
    server = AdapterServer({"code": added(OFF)})
    server.wrong = "1 of 9 tensors differ: code.layers.0; transport"
    settings = ("rollout.drift_patience=1", "weight_update={adapters: true, mode: disk}", "actor.use_lora=true")
    scenes = {name: Scene([server], *settings, adapter=name) for name in ("math", "code")}
    with pytest.raises(LogprobDrift, match=r"the weights of server 0.*code\.layers\.0"):
        asyncio.run(step(scenes, 0))
    assert scenes["code"].sent == [0]


def test_each_adapter_has_an_alarm_with_its_own_trainer():
    settings = ("actor.use_lora=true", "weight_update={adapters: true, mode: disk}", "warm_start=null")
    checked = preflight(load(CONFIG, [*settings, "adapters={math: {}, code: {}}", "actor.backend=fsdp:d1"]))
    assert checked.job is not None, checked.findings
    jobs = {own.adapter: own for own in checked.job.adapters}
    trainers = {name: cast(Any, name) for name in jobs}
    started: Any = SimpleNamespace(job=checked.job, jobs=jobs, policies=trainers, pool=None, sync=None, say=None)
    started.record = None
    hook = make_hook(started)
    assert hook
    assert {name: (alarm._adapter, alarm._trainer) for name, alarm in hook._alarms.items()} == {
        "math": ("math", "math"),
        "code": ("code", "code"),
    }


def test_without_probes_there_is_no_alarm():
    job: Any = SimpleNamespace(config=load(CONFIG, ["rollout.drift_probe_tokens=0"]).config, models={})
    assert make_hook(cast(Any, SimpleNamespace(job=job, jobs={"": job}))) is None
