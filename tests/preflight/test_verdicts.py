"""`allocation check FILE`, `--dry-run` and the run say the same of the same file."""

import re

import pytest
from typer.testing import CliRunner

from allocation.readers import FileError
from areal_like import cli
from areal_like.preflight.reader import read

OVERRIDE = "actor.megatron.override_transformer_config"


@pytest.fixture
def started(monkeypatch):
    """The configurations that would have been run."""
    runs = []

    async def pretend(job, view):
        runs.append(job.config)

    monkeypatch.setattr("areal_like.launch.run", pretend)
    return runs


def shown(findings):
    return [(str(f.severity), f.code, f.where) for f in findings]


@pytest.mark.parametrize(
    ("overrides", "valid"),
    [
        ([], True),
        (["actor.optimizer.min_lr_ratio=0.1"], True),  # a warning
        (["actor.backend=fsdp:d2"], True),
        (["actor.backend=fsdp:d1p2"], False),
        (["rollout.backend=vllm:d1"], False),
        (["rollout.backend=sglang:p2", "cluster.n_gpus_per_node=4"], False),
        ([f"{OVERRIDE}.no_such_field=1"], False),
        (["sglang.extra_args.no_such_option=1"], False),
        (["actor.backend=megatron:d9"], False),
        (["actor.init_model.num_experts=4", "actor.backend=megatron:t2"], False),  # the bridge
        (["cluster.n_nodes=2"], False),  # the machine
        (["train_dataset.path=/nowhere.jsonl"], False),
        (["gconfig.n_samples=x", "seeed=1"], False),
        (["cluster.fileroot=/dev/null/runs"], False),
    ],
)
def test_the_three_verdicts_are_one(write, started, overrides, valid):
    file = str(write())
    checked = read(file, overrides)
    assert (checked.plan is not None) == valid
    texts = []
    for dry_run in (["--dry-run"], []):
        result = CliRunner().invoke(cli.app, ["--config", file, *overrides, *dry_run])
        assert result.exit_code == (0 if valid else cli.INVALID), result.output
        texts.append(re.findall(r"^(error|warning|note)\[(.+?)\] in (.+?): ", result.stderr, re.MULTILINE))
    assert texts == [shown(checked.findings)] * 2
    assert len(started) == valid


@pytest.mark.parametrize("text", ["- 1\n", "a: [\n"])
def test_a_file_that_is_no_configuration_is_located(write, text):
    with pytest.raises(FileError, match=r"run\.yaml"):
        read(str(write(text)), [])


def test_what_was_checked_is_said(write):
    assert read(str(write()), []).checked_with == "cluster 1x3, model actor.init_model, batch 4x2"


def test_a_dry_run_shows_the_layout_as_it_is_written(write):
    layout = "sglang[rollout]:d1+megatron[actor]:d2"
    overrides = [f"allocation_mode={layout}", "actor.backend=null", "rollout.backend=null"]
    result = CliRunner().invoke(cli.app, ["--config", str(write()), *overrides, "--dry-run"])
    assert f"{layout} on cpu, 4 steps" in result.stdout
