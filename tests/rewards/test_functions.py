"""Rewards of a user's own: what they may be, and what becomes of those that misbehave."""

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from areal_like.core.config.schema import RewardConfig, RewardPartConfig
from areal_like.core.types import Prompt, Reward
from areal_like.core.user_code import Portable, UserCodeError, load_object
from areal_like.data.tokenizer import Tokenizer
from areal_like.rewards import functions
from areal_like.rewards.scoring import Rewards
from areal_like.rewards.worker import LOG_BYTES

OWN = """
import asyncio, math, os, subprocess, time

def score(response: str, row: dict) -> float:
    return float(row["goal"] in response)

async def later(response, row):
    await asyncio.sleep(0)
    return {"reward": len(response), "half": len(response) / 2}

def score_group(responses, row):
    print("seen", len(responses))
    return [response == max(responses, key=len) for response in responses]

def misbehave(response, row):
    if response == "raise":
        return row["missing column"]
    if response == "exit":
        raise SystemExit(3)
    if response == "hang":
        subprocess.Popen(["sleep", "4321"])
        time.sleep(3600)
    if response == "fork":
        if os.fork() == 0:
            return 1.0
        subprocess.Popen(["sleep", "4321"])
        return 0.5
    if response == "print":
        for _ in range(100):
            print("x" * 1_000_000)
        os.write(1, b"y" * 1_000_000)
        return 0.25
    if response in ("odd", "cancelled", "interrupted"):
        raise {"odd": Odd, "cancelled": asyncio.CancelledError, "interrupted": KeyboardInterrupt}[response]
    return {"nan": math.nan, "huge": -1e39, "none": None, "text": "1.0", "dict": {"score": 1.0}, "part": {"reward": 1, "b": "x"}}[response]

def too_few(responses, row):
    return [1.0]

def one_for_all(responses, row):
    return 1.0

def no_row(response):
    return 1.0

def unclear(a, b):
    return 1.0

number = 5

class Odd(BaseException):
    pass
"""

WITH_PROCESSES = """
import subprocess
from concurrent.futures import ProcessPoolExecutor

server = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

def score(response, row):
    print(response, file=server.stdin)
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(len, server.stdout.readline()).result()
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("own") / "my_rewards.py"
    file.write_text(OWN)
    return file


def judged(config: RewardConfig, responses: list[str], **more) -> tuple[list[Reward], dict[str, float]]:
    async def run():
        async with Rewards(config, Tokenizer.make("bytes"), **more) as rewards:
            tokens = [Tokenizer.make("bytes").encode(response) for response in responses]
            given = await rewards.score(Prompt(0, [], row={"goal": "b"}), list(map(_array, tokens)))
            return given, rewards.statistics()

    return asyncio.run(run())


def _array(tokens):
    import numpy as np

    return np.array(tokens, np.int32)


def test_several_are_added_with_their_weights_and_recorded_by_name(own):
    parts = {
        "right": RewardPartConfig(function=f"{own}:score", weight=2.0),
        "length": RewardPartConfig(function=f"{own}:later", weight=-0.1),
        "longest": RewardPartConfig(function=f"{own}:score_group"),
    }
    rewards, statistics = judged(RewardConfig(parts=parts, workers=1), ["ab", "a", "cccc"])
    assert [reward.value for reward in rewards] == pytest.approx([2 - 0.2, -0.1, 1 - 0.4])
    assert rewards[0].parts == {"right": 1.0, "length": 2.0, "longest": 0.0, "length.half": 1.0}
    assert not any(name.startswith("reward_missing") for name in statistics)


def test_what_misbehaves_is_missing_and_counted_and_disturbs_nobody(own, tmp_path):
    said, log = [], tmp_path / "rewards.log"
    config = RewardConfig(function=f"{own}:misbehave", workers=2, timeout_s=2.0)
    wrong = ["raise", "exit", "nan", "none", "text", "dict", "part", "odd", "cancelled", "interrupted"]
    start = time.monotonic()
    rewards, statistics = judged(config, [*wrong, "hang", "fork", "print"], log=log, say=said.append)
    assert [reward.value for reward in rewards] == [None] * 11 + [0.5, 0.25]
    assert statistics["reward_missing/raised"] == 10 and statistics["reward_missing/timed_out"] == 1
    assert time.monotonic() - start < 200
    assert len(said) == 2 and "my_rewards.py:misbehave, line 17: KeyError: 'missing column'" in said[0]
    assert "more than 2 s" in said[1]
    assert "Timeout" in log.read_text() and "KeyError" in log.read_text()
    assert log.stat().st_size < 4 * LOG_BYTES
    assert [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4321"]] == []


def test_every_call_may_use_processes_and_one_that_was_started_with_the_module_stays(tmp_path):
    (file := tmp_path / "with_processes.py").write_text(WITH_PROCESSES)
    rewards, _ = judged(RewardConfig(function=f"{file}:score", workers=1), ["a", "ab", "abc"])
    assert [reward.value for reward in rewards] == [2.0, 3.0, 4.0]
    assert [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["cat"]] == []


def test_a_row_that_a_worker_cannot_make_is_missing_and_disturbs_nobody(own, tmp_path):
    (file := tmp_path / "rows.py").write_text("import enum\nKind = enum.Enum('Kind', 'A', module=__name__)\n")
    kind, said = load_object(f"{file}:Kind"), []

    async def run():
        async with Rewards(RewardConfig(function=f"{own}:score"), Tokenizer.make("bytes"), say=said.append) as rewards:
            return [await rewards.score_texts(Prompt(0, [], row={"goal": goal}), ["b"]) for goal in (kind.A, "b")]

    assert [reward.value for (reward,) in asyncio.run(run())] == [None, 1.0]
    assert "cannot be sent to or from a worker process: ModuleNotFoundError" in said[0]


def test_a_log_that_cannot_be_written_costs_no_reward(own, tmp_path):
    (tmp_path / "file").touch()
    rewards, _ = judged(RewardConfig(function=f"{own}:score_group", workers=1), ["a"], log=tmp_path / "file/log")
    assert [reward.value for reward in rewards] == [1.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "has no 'nothing'; it has"),
        ("number", "is 5, not a function"),
        ("no_row", r"cannot be called as score\(response, row\): too many positional arguments"),
        ("unclear", r"name its first parameter response \(one at a time\) or responses \(all of a prompt\)"),
    ],
)
def test_what_is_no_reward_function_is_told(own, name, words):
    with pytest.raises(UserCodeError, match=words):
        functions.compares_group(Portable.pack(f"{own}:{name}"))


@pytest.mark.parametrize(
    ("name", "response", "words"),
    [
        ("misbehave", "nan", "returned nan, not a number"),
        ("misbehave", "huge", r"returned -1e\+39, not a number"),
        ("misbehave", "none", "returned None, not a number"),
        ("misbehave", "text", "returned '1.0', not a number"),
        ("misbehave", "dict", "without the key 'reward'; it has score"),
        ("misbehave", "part", "returned 'x', not a number under 'b'"),
        ("too_few", "a", "returned 1 values for 2 responses"),
        ("one_for_all", "a", "returned 1.0, not a list of 2 numbers"),
    ],
)
def test_what_is_no_reward_is_told(own, name, response, words):
    with pytest.raises(UserCodeError, match=words):
        functions.judge(Portable.pack(f"{own}:{name}"))([response] * 2, {})


EXAMPLE = Path(__file__).parents[2] / "examples/own_reward/my_rewards.py"


@pytest.mark.parametrize(
    ("name", "wanted"), [("score", [1.0, 0.0, 1.0]), ("close", [1.0, 0.5, 1.0]), ("shortest", [6 / 12, 0.0, 0.0])]
)
def test_the_examples_rewards(name, wanted):
    reward, row = Portable.pack(f"{EXAMPLE}:{name}"), {"answer": "#### 7"}
    calls = [["#### 7", "#### 8", "#### 7      "]]
    if not functions.compares_group(reward):
        calls = [[response] for response in calls[0]]
    given = [one for call in calls for one in functions.judge(reward)(call, row)]
    assert [one.value for one in given] == pytest.approx(wanted, abs=0.05)


def test_the_examples_reward_is_three_lines_at_most():
    source = EXAMPLE.read_text()
    body = source[source.index("def score") :].partition("\n\n\n")[0]
    assert len(body.splitlines()) <= 3
