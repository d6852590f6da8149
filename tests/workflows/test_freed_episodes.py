"""An episode's objects are freed with the last reference: none is in a cycle, which only full collections free."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer, open_pool, output
from scripted import tokenizer
from test_episodes import ASK, Pool, score

from areal_like.capabilities.report.run_page import RunPage
from areal_like.config.load import load
from areal_like.metrics.console import View
from areal_like.metrics.record import Record
from areal_like.metrics.sinks.scalars import Scalars
from areal_like.rollout.pool import Sampling
from areal_like.runtime import workers
from areal_like.runtime.descendants import resident_bytes
from areal_like.runtime.gc_tuning import gc_tuned
from areal_like.runtime.processes import UserProcesses
from areal_like.runtime.remote import WorkerLimits
from areal_like.types import Prompt
from areal_like.workflows.make import Workflows
from areal_like.workflows.playing import ENTRY

GROUPS, N = 6, 4
OF_EPISODES = {
    "Attempt", "Attempts", "Call", "Future", "Generated", "Progress", "Response", "Session", "SharedTurns", "Stream",
    "Task", "Trajectory", "Turn", "_Answers", "_Group", "_Place", "Request",
}  # fmt: skip
SOURCES = {
    "an answer": f"async def run(row, client):\n    await {ASK}\n    return 1.0",
    "a failure": f"async def run(row, client):\n    await {ASK}\n    raise ValueError('no')",
    "a refused request": f"async def run(row, client):\n    await {ASK.replace('model=', 'n=7, model=')}\n    return 1.0",
    "the limit of turns": f"async def run(row, client):\n    for _ in range(9): await {ASK}\n    return 1.0",
    "the limit of time": f"async def run(row, client):\n    await {ASK}\n    await asyncio.sleep(99)",
    "a request that is left": f"""
async def run(row, client):
    await {ASK}
    try:
        await asyncio.wait_for({ASK}, row["patience"])
    except TimeoutError:
        pass
    return 1.0
""",
    "a stream": f"""
async def run(row, client):
    async for _ in await {ASK.replace("model=", "stream=True, model=")}: pass
    return 1.0
""",
    "a conversation": """
async def run(row, client):
    messages = [{"role": "user", "content": row["question"]}]
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
    return 1.0
""",
    "a group": """
async def run(prompt, n, rollout):
    client = rollout.record()
    return await asyncio.gather(*(rollout.sample(prompt.tokens) for _ in range(n))) and []
""",
}


def alive() -> Counter[str]:
    """Objects of episodes that the collector has not freed, by type."""
    return Counter(name for each in gc.get_objects() if (name := type(each).__name__) in OF_EPISODES)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Nothing but its last reference frees an object."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def left(
    write: Callable[..., Path], tmp_path: Path, processes: UserProcesses, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Counter[str]]:
    """Play groups of a workflow one after the other; return the objects that are still alive, while the run goes on.

    No worker is replaced, because a new one has the objects of the old one.
    """
    monkeypatch.setattr(workers, "MOST_FAILURES", 10**9)

    def left(source: str, *overrides: str) -> Counter[str]:
        (file := tmp_path / "workflow.py").write_text("import asyncio\n" + source)
        names = [f"workflow={file}:run", "episode.max_failed_share=1", *overrides]
        config, own = load(write(), names).config, tokenizer("plain")

        async def main() -> Counter[str]:
            pool: Any = Pool()
            async with Workflows(config, pool, score, own, lambda _: None, 1000, processes) as workflows:
                workflow = workflows.train(Sampling(8, stop_token_ids=own.eos_token_ids), N)
                before = alive()
                for number in range(GROUPS):
                    await workflow(Prompt(number, [7], row={"question": "1 + 1?", "patience": 0.001 * number}), number)
                    pool.answered.clear()  # the fake pool keeps them
                await asyncio.sleep(0.1)  # for callbacks of other threads
                return alive() - before

        return asyncio.run(main())

    return left


@pytest.mark.parametrize("name", SOURCES)
def test_an_episode_leaves_no_cycle(left: Callable[..., Counter[str]], no_collections: None, name: str) -> None:
    found = left(SOURCES[name], "episode.timeout_s=1", "episode.max_turns=5")
    assert sum(found.values()) < GROUPS, found


def test_episodes_with_shared_turns_leave_no_cycle(left: Callable[..., Counter[str]], no_collections: None) -> None:
    found = left(
        SOURCES["a conversation"], "rollout.branch.after=[1]", "rollout.branch.width=2", f"gconfig.n_samples={N}"
    )
    assert sum(found.values()) < GROUPS, found


def test_replaced_workers_leave_no_cycle(no_collections: None) -> None:
    of_workers = {"Worker", "Frames", "Lane", "Marks"}

    def living() -> int:
        return sum(type(each).__name__ in of_workers for each in gc.get_objects())

    async def main() -> list[int]:
        found = []
        async with UserProcesses(ENTRY, pickle.dumps([]), WorkerLimits(1, 1, 60.0), print) as processes:
            own = processes._workers
            for _ in range(4):
                while not (own.all and all(worker.ready for worker in own.all)):
                    await asyncio.sleep(0.05)
                found.append(living())
                processes._loop.call_soon_threadsafe(own.end, own.all[0])
                await asyncio.sleep(0.5)
        return found

    first, *others = asyncio.run(main())
    assert first and max(others) <= first, (first, others)


STEPS, MOST_BYTES = 2000, 1e6  # bytes per 1,000 steps
LOOK = 20  # steps between two looks at the memory


@pytest.mark.long
def test_a_long_run_grows_by_less_than_a_megabyte_in_a_thousand_steps(
    write: Callable[..., Path], tmp_path: Path, processes: UserProcesses
) -> None:
    """Eight episodes a step, with servers, the ledger and the record, as in a run.

    The growth is the slope of the least-squares line through the resident memory of the last three quarters of the
    steps: the first quarter fills caches and the allocator's arenas, and single values differ by some 100 KB.
    """
    (file := tmp_path / "workflow.py").write_text(SOURCES["a conversation"])
    config, own = load(write(), [f"workflow={file}:run", "episode.max_tokens=400"]).config, tokenizer("plain")
    resident = list[int]()

    async def on_generate(server: FakeServer, body: dict[str, Any]) -> Any:
        tokens = [*own.encode_text("ab"), own.eos_token_ids[0]]
        return [output(tokens) for _ in body["rid"]]

    async def main() -> Counter[str]:
        server, before = FakeServer(on_generate), alive()
        record = Record(
            tmp_path, "t", View(False), [Scalars(tmp_path / "metrics.jsonl")], listeners=[RunPage(tmp_path)]
        )
        async with (
            open_pool(server) as pool,
            Workflows(config, pool, score, own, print, 1000, processes) as workflows,
            gc_tuned(),
        ):
            workflow = workflows.train(Sampling(8, stop_token_ids=own.eos_token_ids), N)
            with record.recording():
                for step in range(1, STEPS + 1):
                    prompts = [Prompt(i, [7], row={"question": "1 + 1?"}) for i in (2 * step, 2 * step + 1)]
                    groups = await asyncio.gather(*(workflow(prompt, prompt.sample_id) for prompt in prompts))
                    assert all(item.reward == 1.0 for group in groups for item in group)
                    record.step(step, {"reward": 1.0, **workflows.counts(), **pool.statistics()}, pool.tokens_generated)
                    server.requests.clear()
                    if step % LOOK == 0:
                        resident.append(resident_bytes([os.getpid()]))
            del groups
            await asyncio.sleep(0.1)
            left = alive() - before
        record.close()
        return left

    left = asyncio.run(main())
    assert sum(left.values()) < 200, left  # of 16,000 episodes with 48,000 turns; the servers' watchers, and the like
    counted = resident[len(resident) // 4 :]
    slope = np.polyfit(np.arange(len(counted)) * LOOK, counted, 1)[0] * 1000
    print(
        f"{slope / 1e3:.0f} KB per 1,000 steps; MB: {[round(each / 1e6, 1) for each in resident[:: len(resident) // 10]]}"
    )
    assert slope < MOST_BYTES
