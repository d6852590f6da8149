"""Algorithms by name, what keys change of them, and algorithms of users."""

import pickle
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from areal_like.core.algorithms.batch import policy_batches
from areal_like.core.algorithms.losses import ValueLoss, cispo, cpgd, decoupled_ppo, dpo, sft
from areal_like.core.algorithms.presets import ALGORITHMS, make_algorithm, tells_apart
from areal_like.core.algorithms.settings import KEYS, PRESETS, Settings, settings_of
from areal_like.core.algorithms.types import Algorithm, Experience
from areal_like.core.columns import Ragged
from areal_like.core.config.schema import ActorConfig, RunConfig
from areal_like.core.sampling_masks import KEPT
from areal_like.core.types import TEMPERATURES, TURN_REWARDS, Batch, FinishReason, Trajectory
from areal_like.core.user_code import UserCodeError


def config(algorithm: str, actor: dict | None = None, **sections: dict) -> RunConfig:
    given = {
        "experiment_name": "a",
        "train_dataset": {"path": "b"},
        "actor": {"path": "c", **(actor or {})},
        **sections,
    }
    return RunConfig.model_validate({"algorithm": algorithm, **given})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_built_and_its_loss_travels_to_the_ranks(name: str) -> None:
    made = make_algorithm(config(name))
    assert pickle.loads(pickle.dumps(made.loss)) == made.loss  # noqa: S301


def test_every_setting_is_a_key_that_is_null_unless_it_is_set() -> None:
    decided_by_the_preset = {"objective", "critic", "prompt_baseline", "turns_alone"}
    assert {field.name for field in fields(Settings)} == set(KEYS) | decided_by_the_preset
    assert all(ActorConfig.model_fields[key].default in (None, getattr(Settings(), key)) for key in KEYS)
    for preset in PRESETS.values():
        assert settings_of(preset, ActorConfig()) == preset


def test_keys_change_a_preset() -> None:
    made = make_algorithm(
        config(
            "gspo",
            {"eps_clip": 0.1, "behave_imp_weight_mode": "sequence_mask", "c_clip": 3.0, "loss_agg_mode": "token_mean"},
        )
    )
    assert made.loss.function is decoupled_ppo
    assert made.loss.parameters == replace(
        PRESETS["gspo"],
        eps_clip=0.1,
        eps_clip_higher=0.1,
        behave_imp_weight_mode="sequence_mask",
        c_clip=3.0,
        loss_agg_mode="token_mean",
    )
    assert made.weights is None
    assert settings_of(PRESETS["dapo"], ActorConfig(eps_clip=0.1, eps_clip_higher=0.3)).eps_clip_higher == 0.3


def test_what_an_algorithm_needs_follows_from_its_settings() -> None:
    assert make_algorithm(config("grpo")).needs == {"proximal"}
    assert make_algorithm(config("grpo", {"kl_ctl": 0.1})).needs == {"proximal", "reference"}
    assert make_algorithm(config("grpo", {"kl_loss_coef": 0.1})).needs == {"proximal", "reference"}
    assert make_algorithm(config("distill")).needs == {"proximal", "teacher"}
    assert make_algorithm(config("grpo", {"teacher_coef": 0.1})).needs == {"proximal", "teacher"}
    assert make_algorithm(config("cispo")).needs == set()
    assert make_algorithm(config("cispo")).loss.function is cispo
    assert make_algorithm(config("cpgd", {"policy_drift_coeff": 0.0})).loss.function is cpgd
    ppo = make_algorithm(config("ppo", critic={"eps_clip": 0.25}))
    assert ppo.needs == {"proximal", "values"}
    assert ppo.critic is not None
    assert ppo.critic.parameters == ValueLoss(0.25)
    assert make_algorithm(config("dpo")).needs == {"policy", "reference"}
    assert make_algorithm(config("dpo")).loss.function is dpo


def test_dapo_drops_groups_of_equal_rewards() -> None:
    made = np.zeros(1, np.int32)
    one = Trajectory(0, 0, made, made.astype(np.float32), made, FinishReason.STOP, 1.0)
    other, missing = replace(one, reward=0.0), replace(one, reward=None)
    assert make_algorithm(config("dapo")).keeps is tells_apart
    assert tells_apart([one, other, missing])
    assert not tells_apart([one, one, missing])
    assert tells_apart([missing, missing])


def test_a_group_whose_turns_have_different_rewards_is_kept() -> None:
    """The sums are equal: the first turn is worth 1 in one sample, the second in the other."""
    made = np.array([-1, 0, 0, -1, 0], np.int32)
    first = Trajectory(0, 0, made, made.astype(np.float32), made, FinishReason.STOP, 0.0)
    turns = [np.array(each, np.float32) for each in ([0, 0, 1, 0, 0], [0, 0, 0, 0, 1])]
    one, other = (replace(first, columns={TURN_REWARDS: each}) for each in turns)
    assert tells_apart([one, other])
    assert not tells_apart([one, one])
    assert not tells_apart([first, replace(first, columns={TURN_REWARDS: np.zeros(5, np.float32)})])


def write(folder: Path, text: str) -> str:
    file = folder / f"mine_{len(list(folder.iterdir()))}.py"
    file.write_text(text)
    return f"{file}:make"


def test_an_algorithm_of_a_user(tmp_path: Path) -> None:
    text = """
from dataclasses import replace
from areal_like.core.algorithms.presets import ALGORITHMS

def make(config):
    return replace(ALGORITHMS["grpo"](config), targets=lambda experience: {"advantages": experience.rewards})
"""
    made = make_algorithm(config(write(tmp_path, text)))
    assert isinstance(made, Algorithm)
    assert made.loss == make_algorithm(config("grpo")).loss


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere\n", "cannot be imported: line 1: ModuleNotFoundError: No module named 'nowhere'"),
        ("def other(config): pass\n", "has no 'make'; it has other"),
        ("def make(config):\n    return config.actr\n", "failed: line 2: AttributeError"),
        (
            "def make(config):\n    return 'grpo'\n",
            "returned 'grpo', not an areal_like.core.algorithms.types.Algorithm",
        ),
    ],
)
def test_what_is_wrong_with_an_algorithm_of_a_user_is_said(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserCodeError) as raised:
        make_algorithm(config(write(tmp_path, text)))
    assert words in str(raised.value)


def test_sft_trains_at_its_own_temperature_over_the_whole_vocabulary():
    """However a token was sampled: an agent's request may have had a temperature and masks of its own."""
    fields = {"loss_mask": np.array([0, 1], np.float32), TEMPERATURES: np.array([0, 0.3], np.float32)}
    batch = Batch(np.array([2], np.int32), np.zeros(2, np.int32), {**fields, KEPT: Ragged.from_lists([[], [4, 5]])})
    one = np.ones(1, np.float32)
    (made,) = policy_batches(make_algorithm(config("sft")), Experience(one, one, one, batch, np.zeros(1, bool)))
    assert made.fields.keys().isdisjoint({TEMPERATURES, KEPT})


def test_sft_imitates_what_has_a_reward():
    lengths = np.array([2, 2, 2], np.int32)
    batch = Batch(lengths, np.zeros(6, np.int32), {"loss_mask": np.array([0, 1] * 3, np.float32)})
    experience = Experience(
        np.array([1, 0, -1], np.float32), np.zeros(3, np.int32), np.arange(3, dtype=np.int32), batch, np.zeros(3, bool)
    )
    made = make_algorithm(config("sft"))
    assert made.targets(experience)["loss_mask"].tolist() == [1, 0, 0]
    assert made.loss.function is sft and not made.needs
