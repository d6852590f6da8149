"""No file and no line of a run shows what a configuration keeps secret."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from typer.testing import CliRunner

from areal_like import __main__ as commands
from areal_like.capabilities.report.run_page import RunPage
from areal_like.core.config.findings import ConfigError
from areal_like.core.config.keys import MASK
from areal_like.core.config.load import dump, load
from areal_like.core.types import Prompt
from areal_like.metrics.console import View
from areal_like.metrics.record import Record
from areal_like.metrics.sinks import make_sinks
from areal_like.preflight.resume import check_resume
from areal_like.run.directory import run_directory

CONFIG = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
PROMPTS = [Prompt(0, [0])]
SECRETS = (
    "actor.env_vars={WANDB_API_KEY: s3cret-key, HF_TOKEN: s3cret-token}",
    "critic={env_vars: {HF_TOKEN: s3cret-critic}}",
    "stats_logger.mlflow.tracking_uri=postgresql://me:s3cret-word@host/db",
    "sglang.extra_args={api_key: s3cret-argument}",
)


def loaded(folder: Path, *more: str) -> Any:
    fixed = ("trial_name=t", f"cluster.fileroot={folder}", "recover.mode=auto", "algorithm=ppo")
    return load(CONFIG, [*fixed, *SECRETS, *more])


def test_what_is_printed_and_stored_has_no_secret_and_the_run_still_gets_it(tmp_path: Path) -> None:
    config = loaded(tmp_path).config
    text = dump(config)
    assert "s3cret" not in text
    values = yaml.safe_load(text)
    assert values["actor"]["env_vars"] == {"WANDB_API_KEY": MASK, "HF_TOKEN": MASK}
    assert values["stats_logger"]["mlflow"]["tracking_uri"] == f"postgresql://me:{MASK}@host/db"
    assert config.actor.env_vars["HF_TOKEN"] == "s3cret-token"
    printed = CliRunner().invoke(
        commands.app, ["check", str(CONFIG), "--show-config", f"cluster.fileroot={tmp_path}", SECRETS[0]]
    )
    assert MASK in printed.output and "s3cret" not in printed.output


def test_no_file_of_a_run_has_a_secret_and_the_same_command_goes_on(tmp_path: Path) -> None:
    config = loaded(tmp_path).config
    job = cast(Any, SimpleNamespace(config=config, train_prompts=PROMPTS))
    view = View(enabled=False)

    def record(_: int | None) -> Record:
        about = {"config": dump(config)}
        return Record(config.run_dir, "t", view, about=about, listeners=[RunPage(config.run_dir)])

    async def enter() -> None:
        async with run_directory(job, view, record) as opened:
            opened.record.close()

    asyncio.run(enter())
    files = [path for path in config.run_dir.rglob("*") if path.is_file()]
    assert {"config.yaml", "run.json", "report.html"} <= {path.name for path in files}
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
    assert {path.name: path.stat().st_mode & 0o077 for path in files if path.parent == config.run_dir} == {
        "config.yaml": 0,
        "run.json": 0,
        "report.html": 0,
        "events.jsonl": 0,
    }
    assert list(check_resume(config, PROMPTS, None)) == []
    asyncio.run(enter())


def test_trackers_get_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr("areal_like.metrics.sinks.MLflow", lambda *arguments: given.append(arguments[-1]))
    make_sinks(loaded(tmp_path, "stats_logger.tensorboard=false").config, tmp_path)
    assert MASK in str(given) and "s3cret" not in str(given)


def test_a_masked_file_is_not_taken_for_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump(loaded(tmp_path).config))
    with pytest.raises(ConfigError) as raised:
        load(file)
    assert {str(found.source.key) for found in raised.value.findings} == {
        *("actor.env_vars.WANDB_API_KEY", "actor.env_vars.HF_TOKEN", "critic.env_vars.HF_TOKEN"),
        *("stats_logger.mlflow.tracking_uri", "sglang.extra_args.api_key"),
    }
    assert "${oc.env:NAME}" in str(raised.value.findings[0].help)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as environment:
        environment.setenv("MY_TOKEN", "from outside")
        given = load(CONFIG, ["actor.env_vars={HF_TOKEN: '${oc.env:MY_TOKEN}'}"]).config
    assert given.actor.env_vars == {"HF_TOKEN": "from outside"}


def test_a_message_about_a_wrong_value_does_not_show_it() -> None:
    with pytest.raises(ConfigError) as raised:
        load(CONFIG, ["actor.env_vars={HF_TOKEN: [4711]}"])
    assert "4711" not in str(raised.value.findings[0].message) + str(raised.value.findings[0].help)
