import asyncio
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver

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


HANGING = Verifier(check=lambda answer: None, quick=lambda response, answer: None, verify=verify, preload="time")


@pytest.fixture(autouse=True)
def own_forkserver():
    """Each test starts its own, which preloads what its verifier needs; a process has one."""
    forkserver._forkserver._stop()
    yield
    forkserver._forkserver._stop()


def children() -> set[psutil.Process]:
    """This process's offspring, less multiprocessing's resource tracker and forkserver, one per process, which stay."""
    servers = [child for child in psutil.Process().children() if "multiprocessing" in " ".join(child.cmdline())]
    return {*psutil.Process().children(recursive=True)} - {*servers}


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


def nested(depth: int) -> str:
    return r"\boxed{" + r"\frac{1}{1+" * depth + "2" + "}" * (depth + 1)


def test_degenerate_answers_cost_neither_the_good_ones_nor_much_time():
    """A model in a loop: what is far too long is refused at once, what is short and endless costs its limit alone."""
    towers = [rf"\boxed{{9^{{9^{{9^{{{n}}}}}}}}}" for n in range(10, 18)]
    degenerate = [*towers, *(nested(depth) for depth in range(20, 212))]
    good = [rf"\boxed{{\frac{{{2 * n}}}{{2}}}}" for n in range(1, 21)]
    answers = ["#### 7"] * len(degenerate) + [f"#### {n}" for n in range(1, 21)]

    async def run() -> tuple[list[float | None], tuple[float, float], tuple[float, float]]:
        async with RewardPool(REWARDS["gsm8k"], timeout_s=4.0, workers=2) as pool:
            rewards = await pool.score(degenerate + good, answers)
            return rewards, pool.queue_seconds(), pool.queue_seconds()

    start = time.monotonic()
    rewards, (mean, longest), read_again = asyncio.run(run())
    assert rewards == [None] * 8 + [0.0] * 192 + [1.0] * 20
    assert (
        time.monotonic() - start < 200
    )  # four limits on each worker; 200 answers that reach a worker would need 400 s
    assert 12 < longest < 200 and 4 < mean < longest  # the good ones waited for four limits
    assert read_again == (0.0, 0.0)


LIBRARY = """
import os, time
from pathlib import Path

Path(os.environ["IMPORTS"]).open("a").write("imported\\n")
"""

COUNTING = """
import asyncio
from areal_like.rewards import RewardPool, Verifier

def verify(response, answer):
    import library
    if response == "hang":
        library.time.sleep(3600)
    return 1.0

async def main():
    verifier = Verifier(lambda _: None, lambda *_: None, verify, "library")
    async with RewardPool(verifier, timeout_s=0.2, workers=2) as pool:
        print(await pool.score(["hang"] * 6 + ["good"] * 2, [""] * 8))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_worker_that_replaces_another_imports_nothing_again(tmp_path):
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "main.py").write_text(COUNTING)
    places = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "IMPORTS": str(tmp_path / "imports")}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")], env=os.environ | places, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{[None] * 6 + [1.0] * 2}\n"
    assert (tmp_path / "imports").read_text() == "imported\n"


SCRIPT = """
import asyncio, time
from areal_like.rewards import RewardPool, Verifier

def verify(response, answer):
    if response == "hang":
        print("hanging", flush=True)
        time.sleep(3600)
    return 1.0

async def main():
    async with RewardPool(Verifier(lambda _: None, lambda *_: None, verify, "time"), timeout_s=3600, workers=1) as pool:
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
    assert len(children) == 3  # the worker, the forkserver and the resource tracker
    main.kill()
    main.wait()
    _, alive = psutil.wait_procs(children, timeout=300)
    assert alive == []
