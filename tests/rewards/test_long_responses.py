"""Long responses are decoded and looked at in the workers, short ones on the event loop; the rewards are the same."""

import asyncio

import numpy as np
import pytest

from areal_like.core.config.schema import RewardConfig, RewardPartConfig
from areal_like.core.types import Prompt
from areal_like.data.tokenizer import Tokenizer
from areal_like.rewards import gsm8k, scoring
from areal_like.rewards.scoring import SHORT_TOKENS, Rewards
from areal_like.rewards.verifiers import REWARDS, Verifier

N = 8


@pytest.fixture
def on_the_loop(monkeypatch) -> list[str]:
    """What is done in this process."""
    done = []
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda *args, **more: done.append("decode") or decode(*args, **more))

    def quick(response: str, answer: str) -> float | None:
        done.append("quick")
        return gsm8k.quick(response, answer)

    monkeypatch.setitem(
        scoring.REWARDS, "gsm8k", Verifier(gsm8k.check, _Here(quick), gsm8k.verify, REWARDS["gsm8k"].preload)
    )
    return done


class _Here:
    """A function that is another one in the processes that it is sent to."""

    def __init__(self, function) -> None:
        self._function = function

    def __call__(self, *args):
        return self._function(*args)

    def __reduce__(self):
        return getattr, (gsm8k, "quick")


def scored(length: int) -> list[float | None]:
    tokenizer = Tokenizer.make("bytes")
    texts = [f"é{number} ".ljust(length, "x") + f"#### {number}" for number in range(N)]
    tokens = [np.array(tokenizer.encode(text), np.int32) for text in texts]

    async def main():
        async with Rewards(RewardConfig(workers=2, timeout_s=600), tokenizer) as rewards:
            return await rewards.score(Prompt(0, [], "#### 3"), tokens)

    return [reward.value for reward in asyncio.run(main())]


def test_a_long_group_leaves_the_loop_free(on_the_loop):
    assert scored(4 * SHORT_TOKENS) == [float(number == 3) for number in range(N)]
    assert on_the_loop == []


def test_a_short_group_needs_no_worker(on_the_loop):
    assert scored(SHORT_TOKENS // N - 20) == [float(number == 3) for number in range(N)]
    assert on_the_loop == ["decode"] * N + ["quick"] * N


def test_a_group_that_cannot_be_decoded_is_missing(monkeypatch):
    monkeypatch.setattr(scoring.texts_of, "decoder", _Unusable)
    assert scored(4 * SHORT_TOKENS) == [None] * N


class _Unusable:
    __name__ = "decoder"

    def __init__(self, source: str = "") -> None:
        raise ValueError("no tokenizer")


@pytest.mark.parametrize("length", [1, SHORT_TOKENS])
def test_a_function_receives_special_tokens_if_it_asks_for_them(tmp_path, length):
    (file := tmp_path / "channels.py").write_text(
        "def score(response, row):\n    return response.count('<eos>')\n"
        "def total(responses, row):\n    return [response.count('<eos>') for response in responses]\n"
    )
    tokenizer = Tokenizer.make("bytes")
    end = tokenizer.eos_token_ids[0]
    tokens = [np.array([*tokenizer.encode("a" * length), *[end] * count], np.int32) for count in (0, 2)]
    name = tokenizer.decode([end], special=True)
    file.write_text(file.read_text().replace("<eos>", name))
    parts = {
        "seen": RewardPartConfig(function=f"{file}:score", special_tokens=True),
        "together": RewardPartConfig(function=f"{file}:total", special_tokens=True),
        "unseen": RewardPartConfig(function=f"{file}:score"),
    }

    async def main():
        async with Rewards(RewardConfig(parts=parts, workers=1), tokenizer) as rewards:
            return await rewards.score(Prompt(0, [], row={}), tokens)

    assert name and [reward.parts for reward in asyncio.run(main())] == [
        {"seen": count, "together": count, "unseen": 0.0} for count in (0.0, 2.0)
    ]
