"""The algorithm of a run is built and tried before it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle as ray_pickle

from areal_like.config.load import load
from areal_like.preflight import preflight
from areal_like.preflight.algorithm import find_algorithm
from areal_like.run.start import carry_user_code


def errors(file: Path, *overrides: str) -> list[str]:
    return [str(f) for f in preflight(load(file, overrides)).findings if str(f.severity) == "error"]


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"algorithm={name}"] for name in ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo")),
        ["algorithm=reinforce_pp", "gconfig.n_samples=1"],
        ["actor.kl_ctl=0.1", "ref={}"],
        ["algorithm=dpo", "ref={}"],
        ["algorithm=ppo", "critic={}", "gconfig.n_samples=1"],
    ],
)
def test_what_makes_sense_may_start(write, overrides):
    checked = preflight(load(write(), overrides))
    assert checked.ok, list(map(str, checked.findings))
    assert checked.job.algorithm is not None


@pytest.mark.parametrize(
    ("section", "asked"),
    [("ref", "actor.kl_ctl=0.1"), ("ref", "actor.kl_loss_coef=0.1"), ("critic", "algorithm=ppo")],
)
def test_a_model_that_nothing_asks_is_told(write, section, asked):
    def told(*overrides: str) -> list[str | None]:
        return [f.key for f in preflight(load(write(), overrides)).findings if f.message.startswith("ignored")]

    assert told(f"{section}={{}}") == [section]
    assert told(f"{section}={{}}", asked) == told(f"{section}={{}}", f"{section}=null") == []


def test_a_penalty_for_length_and_episodes_of_several_turns_are_told_apart(write):
    def warned(*overrides: str) -> bool:
        found = preflight(load(write(), ["algorithm=dapo", *overrides])).findings
        return any("several turns" in f.message and str(f.severity) == "warning" for f in found)

    own = f"workflow={Path(__file__).parents[2]}/examples/workflows/calculator.py:run"
    assert warned(own)
    assert not warned() and not warned(own, "actor.overlong_penalty_factor=0")


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_estimators_whose_gradient_would_be_wrong_in_the_reward_are_refused(write, estimator):
    own = ["ref={}", f"actor.kl_estimator={estimator}"]
    (message,) = errors(write(), *own, "actor.kl_ctl=0.1")
    assert f"{estimator} in the reward (actor.kl_ctl)" in message
    assert errors(write(), "ref={}", "actor.kl_ctl=0.1", "actor.kl_estimator=null", "actor.kl_loss_coef=0.1") == []
    assert errors(write(), *own, "actor.kl_loss_coef=0.1") == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm=gspo", "actor.eps_clip=0.4"], "actor.eps_clip"),
        (["algorithm=cispo", "actor.eps_clip=0.4"], "actor.eps_clip"),
        (["algorithm=dapo", "actor.eps_clip=0.2"], "actor.eps_clip"),  # and DAPO's higher range with it
        (["algorithm=gspo", "actor.eps_clip_higher=0.1"], "actor.eps_clip_higher"),
        (["algorithm=dapo", "actor.eps_clip_higher=0.28"], None),
        (["algorithm=gspo"], None),
        (["algorithm=grpo", "actor.eps_clip=0.4"], None),
    ],
)
def test_a_clip_range_that_replaces_the_algorithms_own_is_warned_about(write, overrides, key):
    """As one that was left in a file from another algorithm: with 0.4 nothing of gspo's ratios is clipped."""
    found = preflight(load(write(), [*overrides, "actor.ppo_n_minibatches=2"])).findings
    told = [finding for finding in found if "clips ratios to" in finding.message]
    assert [finding.key for finding in told] == ([key] if key else [])
    if key:
        fix = told[0].help.partition(" to keep")[0].removeprefix("write ").split()
        again = preflight(load(write(), [*overrides, "actor.ppo_n_minibatches=2", *fix]))
        assert again.ok and not any("clips ratios" in finding.message for finding in again.findings)


@pytest.mark.parametrize(
    ("overrides", "code", "severity"),
    [
        (
            ["actor.behave_imp_weight_floor=0.5", "actor.behave_imp_weight_veto=0.6"],
            "RUN-ALGORITHM-WEIGHT",
            "error",
        ),
        (
            [
                "actor.behave_imp_weight_mode=token_mask",
                "actor.behave_imp_weight_cap=1",
                "actor.behave_imp_weight_floor=1",
            ],
            "RUN-ALGORITHM-WEIGHT",
            "error",
        ),
        (["algorithm=gspo", "actor.behave_imp_weight_mode=token_truncate"], "RUN-ALGORITHM-WEIGHT", "warning"),
        (
            ["actor.behave_imp_weight_mode=geometric_mask", "actor.behave_imp_weight_cap=5"],
            "RUN-ALGORITHM-WEIGHT",
            "warning",
        ),
        (["actor.behave_imp_weight_floor=0.5", "actor.behave_imp_weight_veto=1e-4"], None, None),
        (["actor.behave_imp_weight_mode=disabled", "actor.behave_imp_weight_veto=0.5"], None, None),
    ],
)
def test_contradictory_keys_of_the_behaviour_weight_are_reported_with_a_fix_that_works(
    write, overrides, code, severity
):
    def found(*given: str) -> list[tuple[str, str]]:
        findings = preflight(load(write(), given)).findings
        return [(each.code, str(each.severity)) for each in findings if each.code.startswith("RUN-ALGORITHM-WEIGHT")]

    assert found(*overrides) == ([(code, severity)] if code else [])
    if code:
        findings = preflight(load(write(), overrides)).findings
        help = next(each.help for each in findings if each.code == code)
        fix = help.removeprefix("write ").replace(", or ", ",").split(",")[0]
        assert found(*overrides, fix) == []


def test_a_critic_in_float16_is_refused(write):
    own = ["algorithm=ppo", "critic={}", "gconfig.n_samples=1", "actor.dtype=float16"]
    (message,) = errors(write(), *own)
    assert "RUN-CRITIC" in message and "critic.dtype=bfloat16" in message
    assert errors(write(), *own, "critic.dtype=bfloat16") == []


def test_a_misspelt_name_is_told_with_the_nearest_one(write):
    (message,) = errors(write(), "algorithm=grop")
    assert "the algorithm 'grop' is unknown" in message and "grpo" in message


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("experience.rewards", "are array([1., 0., 0., 1.]"),
        ("{'advantages': experience.rewards[:3]}", "'advantages'"),
        ("{'advantages': experience.reward}", "line 5: AttributeError"),
    ],
)
def test_targets_of_a_user_are_tried(write, tmp_path, returned, words):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from areal_like.algorithms.presets import ALGORITHMS\n"
        "\n"
        "def targets(experience):\n"
        f"    return {returned}\n"
        "\n"
        "def make(config):\n"
        "    return replace(ALGORITHMS['grpo'](config), targets=targets)\n"
    )
    (message,) = errors(write(), f"algorithm={file}:make")
    assert words in message


def test_an_algorithm_of_a_user_is_asked_for_the_models_that_it_needs(write, tmp_path):
    file = tmp_path / "needy.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from areal_like.algorithms.presets import ALGORITHMS\n"
        "\n"
        "def make(config):\n"
        "    return replace(ALGORITHMS['grpo'](config), needs=frozenset({'reference', 'values'}))\n"
    )
    _, findings = find_algorithm(load(write(), [f"algorithm={file}:make"]).config)
    assert [found.key for found in findings] == ["critic", "ref"]


OWN = """
import threading
from functools import partial

import {helper}
from areal_like.algorithms.types import Algorithm
from areal_like.types import LossSpec

lock = threading.Lock()


def targets(experience):
    return {{"advantages": experience.rewards}}


def loss(scale, inputs, parameters):
    return {helper}.weigh(inputs) * scale, {{}}


def locked(inputs, parameters):
    with lock:
        return inputs, {{}}


def make(config):
    return Algorithm(targets, LossSpec({loss}))
"""


def test_a_loss_that_cannot_be_sent_to_the_ranks_is_a_finding(write, tmp_path):
    (tmp_path / "unsendable.py").write_text(OWN.format(loss="locked", helper="math"))
    (message,) = errors(write(), f"algorithm={tmp_path}/unsendable.py:make")
    assert "algorithm" in message and "cannot be sent to the trainer's ranks: TypeError" in message


def test_a_loss_goes_to_processes_that_have_nothing_of_what_lies_beside_it(write, tmp_path):
    (tmp_path / "own_weights.py").write_text("import own_deeper\n\ndef weigh(x):\n    return own_deeper.sign * x\n")
    (tmp_path / "own_deeper").mkdir()
    (tmp_path / "own_deeper/__init__.py").write_text("sign = -1\n")
    (tmp_path / "partial_loss.py").write_text(OWN.format(loss="partial(loss, 2.0)", helper="own_weights"))
    checked = preflight(load(write(), [f"algorithm={tmp_path}/partial_loss.py:make"]))
    assert checked.job, list(map(str, checked.findings))
    carry_user_code(checked.job.algorithm)
    (sent := tmp_path / "loss.pickle").write_bytes(ray_pickle.dumps(checked.job.algorithm.loss))
    use = f"import pickle; print(pickle.load(open({str(sent)!r}, 'rb')).function(3, None))"
    ran = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, cwd="/", check=False)
    assert ran.stdout == "(-6.0, {})\n", ran.stderr
