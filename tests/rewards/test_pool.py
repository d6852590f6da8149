import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from areal_like.config.schema import RewardConfig
from areal_like.rewards import REWARDS, RewardPool, Verifier


def verify(response: str, answer: str) -> float:
    """A verifier that hangs or dies where the response says so."""
    if response == "hang":
        time.sleep(3600)
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return float(response == answer)


HANGING = Verifier(quick=lambda response, answer: None, verify=verify)


def children() -> set[psutil.Process]:
    """This process's children, less multiprocessing's resource tracker, which is one per process and stays."""
    return {child for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())}


def test_every_reward_type_of_the_schema_has_a_verifier():
    assert set(RewardConfig.model_fields["type"].annotation.__args__) == set(REWARDS)


def test_a_hanging_or_dying_verifier_is_missing_and_its_neighbours_are_not():
    before = children()

    async def run() -> list[float | None]:
        async with RewardPool(HANGING, timeout_s=1.0, workers=2) as pool:
            return await pool.score(["hang", "a", "die", "b", "hang", "a"], ["a"] * 6)

    assert asyncio.run(run()) == [None, 1.0, None, 0.0, None, 1.0]
    assert children() <= before


def test_closing_does_not_wait_for_a_hanging_verifier():
    before = children()

    async def run() -> float:
        async with RewardPool(HANGING, timeout_s=3600, workers=1) as pool:
            await pool.score(["a"], ["a"])
            hanging = asyncio.ensure_future(pool.score(["hang"], ["a"]))
            await asyncio.sleep(0.3)
            hanging.cancel()
            start = time.monotonic()
        return time.monotonic() - start

    assert asyncio.run(run()) < 300
    assert children() <= before


def test_short_answers_need_no_process():
    async def run() -> tuple[list[float | None], float]:
        async with RewardPool(REWARDS["gsm8k"], timeout_s=300, workers=1) as pool:
            start = time.perf_counter()
            rewards = await pool.score([f"#### {n}" for n in range(500)], ["#### 17"] * 500)
            return rewards, time.perf_counter() - start

    rewards, seconds = asyncio.run(run())
    assert rewards == [float(n == 17) for n in range(500)]
    assert seconds < 5


def test_unequal_numbers_of_responses_and_answers_are_refused():
    async def run() -> None:
        async with RewardPool(REWARDS["gsm8k"], timeout_s=300, workers=1) as pool:
            await pool.score(["#### 1"], [])

    with pytest.raises(ValueError, match="shorter"):
        asyncio.run(run())


SCRIPT = """
import asyncio, time
from areal_like.rewards import RewardPool, Verifier

def verify(response, answer):
    if response == "hang":
        print("hanging", flush=True)
        time.sleep(3600)
    return 1.0

async def main():
    async with RewardPool(Verifier(lambda *_: None, verify), timeout_s=3600, workers=1) as pool:
        await pool.score(["hang"], [""])

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_hanging_worker_ends_when_the_main_process_is_killed(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    main = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    assert main.stdout is not None and main.stdout.readline() == "hanging\n"
    children = psutil.Process(main.pid).children(recursive=True)
    assert len(children) == 2  # the worker and the resource tracker
    main.kill()
    main.wait()
    _, alive = psutil.wait_procs(children, timeout=300)
    assert alive == []
