import asyncio
import functools
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from limits import HUNG_S

from areal_like.core.config.schema import RewardConfig
from areal_like.core.types import Prompt, Reward
from areal_like.data.tokenizer import Tokenizer
from areal_like.rewards import worker
from areal_like.rewards.pool import Cause, Failure, RewardPool
from areal_like.rewards.scoring import Rewards
from areal_like.rewards.verifiers import REWARDS


def verify(response: str, answer: str) -> float:
    """A verifier that hangs or dies where the response says so."""
    if response == "hang":
        time.sleep(3600)
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return float(response == answer)


def load():
    return verify


async def judge(pool: RewardPool, responses: list[str], answer: str = "a") -> list[object]:
    outcomes = await asyncio.gather(*(pool.call(load, response, answer) for response in responses))
    return [outcome.cause if isinstance(outcome, Failure) else outcome for outcome in outcomes]


def values(rewards: list[Reward]) -> list[float | None]:
    return [reward.value for reward in rewards]


def children() -> set[psutil.Process]:
    return {*psutil.Process().children(recursive=True)}


def test_every_reward_type_of_the_schema_has_a_verifier():
    assert set(RewardConfig.model_fields["type"].annotation.__args__) == {*REWARDS, "model", "judge"}


def test_what_judges_imports_neither_configuration_nor_tokenizers():
    gsm8k, imported = REWARDS["gsm8k"], functools.partial(pkgutil.resolve_name, "sys:modules.__contains__")
    with RewardPool(timeout_s=30, workers=1, preload=[gsm8k.preload]) as pool:
        assert pool.call_and_wait(functools.partial(worker.itself, gsm8k.verify), "#### 1/2", "#### 0.5") == 1.0
        found = {name: pool.call_and_wait(imported, name) for name in ("sympy", "pydantic", "omegaconf", "tokenizers")}
    assert found == {"sympy": True, "pydantic": False, "omegaconf": False, "tokenizers": False}


def test_a_hanging_or_dying_call_fails_and_its_neighbours_do_not():
    before = children()

    async def run() -> list[object]:
        async with RewardPool(timeout_s=1.0, workers=2) as pool:
            return await judge(pool, ["hang", "a", "die", "b", "hang", "a"])

    hung, died = Cause.TIMED_OUT, Cause.DIED
    assert asyncio.run(run()) == [hung, 1.0, died, 0.0, hung, 1.0]
    assert children() <= before


class Unpicklable:
    def __reduce__(self):
        raise KeyError("it fails in any way it likes")


@pytest.mark.parametrize("value", [lambda: 1, threading.Lock(), (i for i in ()), Unpicklable()])
def test_what_cannot_be_sent_to_a_worker_is_a_failure_of_that_call(value):
    async def main():
        async with RewardPool(timeout_s=HUNG_S, workers=1) as pool:
            return await pool.call(load, "a", value), await pool.call(load, "a", "a")

    failed, next_one = asyncio.run(main())
    assert failed.cause is Cause.RAISED and "cannot be sent to or from a worker process" in failed.message
    assert next_one == 1


def test_closing_does_not_wait_for_a_hanging_call():
    before = children()

    async def run() -> float:
        async with RewardPool(timeout_s=3600, workers=1) as pool:
            await judge(pool, ["a"])
            hanging = asyncio.ensure_future(judge(pool, ["hang"]))
            await asyncio.sleep(0.3)
            hanging.cancel()
            start = time.monotonic()
        return time.monotonic() - start

    assert asyncio.run(run()) < 300
    assert children() <= before


def test_short_answers_need_no_process():
    async def run() -> tuple[list[Reward], float]:
        async with Rewards(RewardConfig(timeout_s=300, workers=1), Tokenizer.make("bytes")) as rewards:
            start = time.perf_counter()
            given = await rewards.score_texts(Prompt(0, [], "#### 17"), [f"#### {n}" for n in range(500)])
            return given, time.perf_counter() - start

    given, seconds = asyncio.run(run())
    assert values(given) == [float(n == 17) for n in range(500)]
    assert seconds < 5


def nested(depth: int) -> str:
    return r"\boxed{" + r"\frac{1}{1+" * depth + "2" + "}" * (depth + 1)


def test_degenerate_answers_cost_neither_the_good_ones_nor_much_time():
    """A model in a loop: what is far too long is refused at once, what is short and endless costs its limit alone."""
    towers = [rf"\boxed{{9^{{9^{{9^{{{n}}}}}}}}}" for n in range(10, 14)]
    degenerate = [*towers, *(nested(depth) for depth in range(20, 216))]

    async def run() -> tuple[list[Reward], list[list[Reward]], dict[str, float], dict[str, float]]:
        async with Rewards(RewardConfig(timeout_s=4.0, workers=2), Tokenizer.make("bytes")) as rewards:
            bad = asyncio.ensure_future(rewards.score_texts(Prompt(0, [], "#### 7"), degenerate))
            await asyncio.sleep(0)
            good = [
                rewards.score_texts(Prompt(0, [], f"#### {n}"), [rf"\boxed{{\frac{{{2 * n}}}{{2}}}}"])
                for n in range(1, 21)
            ]
            return await bad, await asyncio.gather(*good), rewards.statistics(), rewards.statistics()

    start = time.monotonic()
    bad, good, statistics, read_again = asyncio.run(run())
    assert values(bad) == [None] * 4 + [0.0] * 196
    assert [values(given) for given in good] == [[1.0]] * 20
    assert time.monotonic() - start < 200  # two limits on each worker; 200 answers that reach one would need 400 s
    mean, longest = statistics["queue_seconds_mean"], statistics["queue_seconds_max"]
    assert 4 < longest < 200 and 0 < mean < longest  # the last of the bad ones waited for a limit
    assert statistics["reward_missing/timed_out"] == 4
    assert read_again == {"queue_seconds_mean": 0.0, "queue_seconds_max": 0.0, "reward_missing/timed_out": 0.0}


LIBRARY = """
import os, time
from pathlib import Path

Path(os.environ["IMPORTS"]).open("a").write("imported\\n")

def verify(response):
    if response == "hang":
        time.sleep(3600)
    return 1.0

def load():
    return verify
"""

COUNTING = """
import asyncio
from areal_like.rewards.pool import Failure, RewardPool

async def main():
    import library
    async with RewardPool(timeout_s=0.5, workers=2, preload=["library"]) as pool:
        calls = [pool.call(library.load, response) for response in ["hang"] * 6 + ["good"] * 2]
        print([isinstance(outcome, Failure) for outcome in await asyncio.gather(*calls)])

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
    assert done.stdout == f"{[True] * 6 + [False] * 2}\n"
    assert (tmp_path / "imports").read_text() == "imported\n" * 2  # by the script, and by the forkserver


SCRIPT = """
import sys, time
from pathlib import Path

def verify(file):
    Path(file).write_text("hanging")
    time.sleep(3600)

def load():
    return verify
"""

MAIN = """
import asyncio, sys
import hanging
from areal_like.rewards.pool import RewardPool

async def main():
    async with RewardPool(timeout_s=3600, workers=1) as pool:
        await pool.call(hanging.load, sys.argv[1])

asyncio.run(main())
"""


def test_a_hanging_worker_ends_when_the_main_process_is_killed(tmp_path):
    (tmp_path / "hanging.py").write_text(SCRIPT)
    (tmp_path / "main.py").write_text(MAIN)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    main = subprocess.Popen([sys.executable, str(tmp_path / "main.py"), str(tmp_path / "now")], env=environment)
    while not (tmp_path / "now").exists():
        assert main.poll() is None
        time.sleep(0.1)
    children = psutil.Process(main.pid).children(recursive=True)
    assert len(children) == 2  # the fork server and the worker
    main.kill()
    main.wait()
    _, alive = psutil.wait_procs(children, timeout=HUNG_S)
    assert alive == []
