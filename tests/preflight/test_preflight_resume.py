"""What a command may go on with, and what it may change."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from areal_like.core.checkpoint.journal import Journal, RunState, Step
from areal_like.core.checkpoint.store import DIRECTORY, JOURNAL
from areal_like.core.config.load import load
from areal_like.data.dataset import fingerprints
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.metrics.record import Record
from areal_like.preflight import preflight
from areal_like.run.directory import run_directory

CONFIG = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
SETTINGS = (
    *("trial_name=t", "total_train_steps=5", "recover.mode=auto", "stats_logger.console=false"),
    *("train_dataset.arithmetic.size=256", "valid_dataset.arithmetic.size=64"),
)


def found(folder: Path, *overrides: str) -> dict[str, str]:
    """Message and help of every finding about the directory, by key."""
    checked = preflight(load(CONFIG, [*SETTINGS, f"cluster.fileroot={folder}", *overrides]))
    ours = [finding for finding in checked.findings if finding.code.startswith(("RUN-RESUME-", "RUN-DIRECTORY"))]
    return {str(finding.source.key).partition(" ")[0]: f"{finding.message}; {finding.help}" for finding in ours}


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run that has a checkpoint of step 3; its directory."""
    job = cast(Job, preflight(load(CONFIG, [*SETTINGS, f"cluster.fileroot={tmp_path}"])).job)
    leave(job, 3)
    return job.config.run_dir


def leave(job: Job, version: int, ending: type[BaseException] | None = None) -> None:
    async def begin() -> None:
        view = View(enabled=False)
        async with run_directory(job, view, lambda _: Record(job.config.run_dir, "t", view)) as opened:
            store, journal = cast(Any, opened.store), cast(Journal, opened.journal)
            for step in range(len(journal.steps()) + 1, version + 1):
                journal.append(Step(step, [], []))
            record = {"rewards": {}, "held_out": {}}
            store.commit(store.begin(version), RunState(version, started=version * 64, record=record), {})
            if ending:
                raise ending

    asyncio.run(begin())


def test_the_same_command_goes_on(begun: Path) -> None:
    assert found(begun.parents[1]) == {}


@pytest.mark.parametrize(
    "override",
    [
        *("actor.backend=megatron:t2", "total_train_steps=9", "evaluator.freq_steps=2", "recover.keep=7"),
        "actor.fsdp.gradient_checkpointing=true",
        *("actor.timeout_s=77", "reward.timeout_s=3", "rollout.max_head_offpolicyness=2", "saver.freq_steps=1"),
    ],
)
def test_what_does_not_make_it_another_run_may_change(begun: Path, override: str) -> None:
    assert found(begun.parents[1], override) == {}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=2", "write seed=1, or choose another trial_name"),
        ("actor.optimizer.lr=1e-3", "write actor.optimizer.lr=0.0008, or"),
        ("gconfig.n_samples=4", "started with 8, not 4"),
        ("actor.megatron.use_distributed_optimizer=false", "write actor.megatron.use_distributed_optimizer=true, or"),
        ("train_dataset.batch_size=32", "write train_dataset.batch_size=64, or"),
        ("train_dataset.shuffle=false", "write train_dataset.shuffle=true, or"),
    ],
)
def test_another_key_is_refused_by_name(begun: Path, override: str, said: str) -> None:
    key = override.partition("=")[0]
    findings = found(begun.parents[1], override)
    assert findings.keys() == {key}
    assert said in findings[key]


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("actor.adv_norm.mean_level=batch", "actor.adv_norm", "write actor.adv_norm=null, or"),
        ("actor.reward_norm.mean_level=batch", "actor.reward_norm", "write actor.reward_norm=null, or"),
        ("warm_start=null", "warm_start", "started with a section, not null"),
        ("critic={}", "critic", "write critic=null, or"),
        ("ref={}", "ref", "write ref=null, or"),
        ("reward.parts.other.type=gsm8k", "reward.parts.other", "leave it out, or"),
    ],
)
def test_a_section_or_an_entry_more_or_less_is_refused_by_name(begun: Path, override: str, key: str, said: str) -> None:
    findings = found(begun.parents[1], override)
    assert key in findings
    assert said in findings[key]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (
            "ref.megatron={use_dist_checkpointing: true, dist_checkpointing_path: /x}",
            "ref.megatron.use_dist_checkpointing",
        ),
        ("critic.megatron.use_distributed_optimizer=false", "critic.megatron.use_distributed_optimizer"),
        ("critic.optimizer.lr=0.5", "critic.optimizer.lr"),
        ("ref.megatron.param_offload=true", None),
        ("ref.fsdp.gradient_checkpointing=true", None),
        ("ref.dtype=float32", None),
    ],
)
def test_what_a_role_has_from_the_actor_is_what_its_own_section_is_held_against(
    tmp_path: Path, override: str, key: str | None
) -> None:
    roles = ("algorithm=ppo", "critic={}", "ref={}", "actor.kl_ctl=0.1")
    leave(cast(Job, preflight(load(CONFIG, [*SETTINGS, *roles, f"cluster.fileroot={tmp_path}"])).job), 3)
    findings = found(tmp_path, *roles, override)
    assert key in findings if key else findings == {}


def test_what_is_gone_is_given_again_as_the_run_s_configuration_has_it(begun: Path) -> None:
    again = json.dumps(yaml.safe_load((begun / "config.yaml").read_text())["warm_start"])
    assert f"write it as in {begun}/config.yaml, or" in found(begun.parents[1], "warm_start=null")["warm_start"]
    assert found(begun.parents[1], "warm_start=null", f"warm_start={again}") == {}


def test_keys_of_another_version_are_no_change_while_they_have_their_default(begun: Path) -> None:
    """The run's version may lack keys of this one, and have some that are gone."""
    file = begun / "config.yaml"
    values = yaml.safe_load(file.read_text())
    del values["seed"], values["actor"]["adv_norm"], values["actor"]["optimizer"]["beta1"], values["episode"]
    values["gconfig"]["gone"] = 3
    file.write_text(yaml.safe_dump(values))
    assert found(begun.parents[1]) == {}
    assert found(begun.parents[1], "seed=2").keys() == {"seed"}
    assert found(begun.parents[1], "episode.max_turns=3").keys() == {"episode.max_turns"}


@pytest.mark.parametrize(
    ("files", "other"),
    [((".metadata", "metadata.json"), "actor.backend=fsdp:d1"), ((".metadata",), "actor.backend=megatron:d1")],
)
def test_a_checkpoint_of_the_other_backend_is_refused(begun: Path, files: tuple[str, ...], other: str) -> None:
    role, settings = begun / "recover/step-3/actor", begun / "config.yaml"
    role.mkdir()
    for name in files:
        (role / name).touch()
    backend, to = ("megatron", "fsdp") if "metadata.json" in files else ("fsdp", "megatron")
    settings.write_text(settings.read_text().replace("backend: megatron:d2", f"backend: {backend}:d2"))
    assert found(begun.parents[1], f"actor.backend={backend}:d1") == {}
    said = found(begun.parents[1], other)
    assert said.keys() == {"actor.backend"}
    assert (
        f"is a {backend} checkpoint, which {to} cannot read; write actor.backend={backend}:d2, or"
        in said["actor.backend"]
    )
    assert found(begun.parents[1], f"actor.backend={backend}:d2") == {}


def test_other_data_is_refused(begun: Path) -> None:
    findings = found(begun.parents[1], "train_dataset.arithmetic.seed=3")
    assert findings.keys() == {"train_dataset", "train_dataset.arithmetic.seed"}
    assert "has other training prompts" in findings["train_dataset"]


def test_a_run_begun_by_an_earlier_version_goes_on(begun: Path) -> None:
    job = cast(Job, preflight(load(CONFIG, [*SETTINGS, f"cluster.fileroot={begun.parents[1]}"])).job)
    now, earlier = fingerprints(job.train_prompts)
    text = (file := begun / DIRECTORY / JOURNAL).read_text()
    assert now in text
    file.write_text(text.replace(now, earlier))
    assert found(begun.parents[1]) == {}
    leave(job, 4)


def test_a_run_without_checkpoints_is_not_entered(begun: Path) -> None:
    assert "holds the results of another run" in found(begun.parents[1], "recover.mode=off")["trial_name"]


def test_a_finished_run_has_nothing_to_go_on_with(begun: Path) -> None:
    (begun / "summary.json").write_text("{}")
    assert found(begun.parents[1]) == {}  # of 5 steps it has 3
    findings = found(begun.parents[1], "total_train_steps=3")
    assert "has finished all 3 steps; raise total_train_steps, or choose another" in findings["recover.mode"]


def test_fault_leaves_alone_what_ended_by_itself_until_it_was_gone_on_with(begun: Path) -> None:
    (begun / "summary.json").write_text("{}")
    more = "recover.mode=fault", "total_train_steps=9"
    said = found(begun.parents[1], *more)["recover.mode"]
    assert " finished; write recover.mode=auto to resume it" in said
    job = cast(Job, preflight(load(CONFIG, [*SETTINGS, f"cluster.fileroot={begun.parents[1]}", *more[1:]])).job)
    with pytest.raises(RuntimeError):
        leave(job, 6, RuntimeError)
    assert found(begun.parents[1], *more) == {}


@pytest.mark.parametrize("by_hand", [KeyboardInterrupt, asyncio.CancelledError])
def test_fault_leaves_alone_what_was_interrupted_by_hand(tmp_path: Path, by_hand: type[BaseException]) -> None:
    """Ctrl-C cancels the run's task, as does a notebook."""
    job = cast(Job, preflight(load(CONFIG, [*SETTINGS, f"cluster.fileroot={tmp_path}"])).job)
    with pytest.raises(RuntimeError) as raised:
        leave(job, 3, RuntimeError)
    assert raised.value.__notes__ == [
        f"the last checkpoint is {job.config.run_dir}/recover/step-3; the same command with trial_name=t resumes from it"
    ]
    assert found(tmp_path, "recover.mode=fault") == {}
    with pytest.raises(by_hand):
        leave(job, 4, by_hand)
    said = found(tmp_path, "recover.mode=fault")["recover.mode"]
    assert "was interrupted by hand; write recover.mode=auto to resume it" in said
    assert found(tmp_path) == {}


HOSTS = ("scheduler.type=ray", "cluster.n_nodes=3", "cluster.n_gpus_per_node=1", "recover.layouts=[{}]")


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ("fsdp:d1", "fsdp cannot load checkpoints of megatron"),
        ("megatron:t2", "its trainer needs 2 GPUs, the present one has 2"),
        ("megatron:d64", "CPU slots|GPUs"),
    ],
)
def test_a_layout_that_a_restarted_trainer_can_never_use_is_refused(tmp_path: Path, layout: str, problem: str) -> None:
    trained = ("actor.backend=megatron:d2", "rollout.backend=sglang:d1", *HOSTS)
    overrides = [*SETTINGS, f"cluster.fileroot={tmp_path}", *(each.format(layout) for each in trained)]
    (told,) = (each for each in preflight(load(CONFIG, overrides)).findings if each.code == "RUN-RECOVER-LAYOUT")
    assert told.source.key == "recover.layouts"
    assert re.search(problem, told.message)
