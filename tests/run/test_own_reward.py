"""The example of rewards of one's own, as its users run it: with the installed package and the real engines."""

from __future__ import annotations

import json
import sys

import pytest
from running import ROOT, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_like.data.tokenizer import Tokenizer
from areal_like.demo import arithmetic

sys.path.append(str(ROOT / "tests/rewards"))
from classifiers import classifier, scores

OWN = ROOT / "examples/own_reward/my_rewards.py"


@pytest.mark.long
def test_own_rewards_train_and_their_parts_are_recorded(tmp_path) -> None:
    parts = (
        f"reward.parts.right.function={OWN}:score",
        f"reward.parts.close.function={OWN}:close",
        f"reward.parts.short.function={OWN}:shortest",
        "reward.parts.close.weight=0.25",
    )
    more = ("total_train_steps=2", "warm_start.target_reward=0.2", "warm_start.steps=100", "saver.freq_steps=null")
    with run(tmp_path, *parts, *more) as started:
        assert started.end() == 0, started.errors
        assert started.remains() == []
    events = EventAccumulator(str(started.directory / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {f"reward_parts/{name}" for name in ("right", "close", "short", "close.off")} <= tags
    assert not {tag for tag in tags if tag.startswith("reward_missing/")}
    last = {tag: events.Scalars(tag)[-1].value for tag in tags}
    weighted = last["reward_parts/right"] + 0.25 * last["reward_parts/close"] + last["reward_parts/short"]
    assert last["reward/mean"] == pytest.approx(weighted, abs=1e-5)


@pytest.mark.long
def test_a_reward_model_scores_on_a_server_of_its_own(tmp_path) -> None:
    model = classifier(tmp_path / "classifier")
    parts = ("reward.parts.liked.type=model", "reward.parts.liked.weight=0.5", "reward.parts.right.type=gsm8k")
    where = (f"reward.model.path={model}", "reward.model.backend=sglang:d1", "cluster.n_gpus_per_node=4")
    more = ("total_train_steps=2", "warm_start.target_reward=0.2", "warm_start.steps=100", "saver.freq_steps=null")
    with run(tmp_path, *parts, *where, *more) as started:
        assert started.end() == 0, started.errors
        assert started.remains() == []
    samples = [json.loads(line) for line in (started.directory / "samples/step-000002.jsonl").read_text().splitlines()]
    assert samples and all(sample["reward"] is not None for sample in samples)
    own, sample = Tokenizer.load(str(started.directory / "initial_model")), samples[0]
    question = arithmetic.generate(64, 5, 0, "train")[sample["sample_id"]]["question"]
    response = own.decode(own.encode_text(sample["response"]))
    conversation = [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
    assert sample["parts"]["liked"] == pytest.approx(scores(model, [conversation])[0], abs=1e-3)
    assert sample["reward"] == pytest.approx(sample["parts"]["liked"] / 2 + sample["parts"]["right"])
