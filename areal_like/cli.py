"""The command line of a run: `SCRIPT --config FILE [--dry-run] key=value ...`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from allocation import Finding, Plan, render
from areal_like.config.findings import ConfigError
from areal_like.config.load import LoadedConfig, dump, load
from areal_like.config.schema import RunConfig
from areal_like.errors import DirectoryTaken, RunError
from areal_like.metrics.console import View
from areal_like.preflight import Preflight, preflight
from areal_like.train import Job, run

INVALID, FAILED, INTERRUPTED = 2, 1, 130

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="The run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...", help="Changes to it.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, start nothing.")] = False,
) -> None:
    """Train a model by asynchronous reinforcement learning.

    Everything that can be known is checked before a process starts. Exit code 2: the configuration is wrong; 1: the
    run failed; 130: interrupted.

    Example: --config examples/math/gsm8k_grpo_cpu.yaml actor.backend=megatron:t2 total_train_steps=20
    """
    loaded, checked = _check(config, overrides or [], dry_run)
    if not dry_run:
        raise typer.Exit(_run(loaded.config, checked))
    typer.echo(dump(loaded.config))
    if checked.plan and checked.device:
        Console().print(_describe_plan(checked.plan, checked.device, checked.steps))
    typer.echo("everything was checked: the run may start")


def _check(file: Path, overrides: Sequence[str], dry_run: bool) -> tuple[LoadedConfig, Preflight]:
    try:
        loaded = load(file, overrides)
    except ConfigError as error:
        raise _refuse(error.findings) from error
    checked = preflight(loaded, dry_run=dry_run)
    if not checked.ok:
        raise _refuse(checked.findings)
    if checked.findings:
        _print(checked.findings)
    return loaded, checked


def _refuse(findings: Sequence[Finding]) -> typer.Exit:
    _print(findings)
    return typer.Exit(INVALID)


def _print(findings: Sequence[Finding]) -> None:
    _complain("\n\n".join(map(render, findings)))


def _describe_plan(plan: Plan, device: str, steps: int) -> Table:
    """The layout as a table, one row per engine."""
    table = Table(title=f"{plan.allocation} on {device}, {steps} steps", title_justify="left")
    for column in ("role", "backend", "GPUs" if device == "cuda" else "slots", "dense grid", "expert grid"):
        table.add_column(column)
    for engine in plan.engines:
        sizes = engine.sizes
        dense = f"{sizes.dp} servers, tp {sizes.tp}, pp {sizes.pp}, ep {sizes.ep}"
        expert = ""
        if engine.dense and not engine.servers:
            dense = f"dp {sizes.dp}, tp {sizes.tp}, pp {sizes.pp}, cp {sizes.cp}, vpp {sizes.vpp}"
            expert = f"ep {sizes.ep}, etp {sizes.etp}, edp {sizes.edp}"
        places = ", ".join(f"{ids.start}-{ids.stop - 1}" if len(ids) > 1 else str(ids.start) for ids in engine.gpus)
        table.add_row(engine.role, engine.backend, places, dense, expert)
    return table


def _run(config: RunConfig, checked: Preflight) -> int:
    """Run and report; returns the exit code."""
    if checked.device is None or checked.plan is None or checked.tokenizer is None:  # checks without errors made both
        raise ValueError("the configuration was not checked")
    job = Job(
        config=config,
        device=checked.device,
        plan=checked.plan,
        tokenizer=checked.tokenizer,
        train_prompts=checked.train_prompts,
        valid_prompts=checked.valid_prompts,
        steps=checked.steps,
    )
    view = View(config.stats_logger.console)
    try:
        with view.live():
            asyncio.run(run(job, view))
    except KeyboardInterrupt:
        _complain("interrupted; every process of the run has ended")
        return INTERRUPTED
    except SystemExit:
        _complain("terminated; every process of the run has ended")
        raise
    except (ExceptionGroup, RunError) as error:
        first = _first_leaf(error)
        if not isinstance(first, RunError):
            raise
        _complain(f"the run failed: {first}")
        return INVALID if isinstance(first, DirectoryTaken) else FAILED
    return 0


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _complain(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
