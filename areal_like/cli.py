"""The command line of a run: `SCRIPT --config FILE [--dry-run] key=value ...`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_like.core.config.findings import ConfigError
from areal_like.core.config.load import LoadedConfig, dump, load
from areal_like.core.errors import RunError
from areal_like.data.end_tokens import describe_end_tokens
from areal_like.job import Job
from areal_like.launch import check, train
from areal_like.metrics.console import complain
from areal_like.run.startup_report import describe_graphs

INVALID, FAILED, INTERRUPTED = 2, 1, 130

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML file of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value ...", help="Overrides of the file.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and start nothing.")] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="With --dry-run: print the whole configuration.")
    ] = False,
) -> None:
    """Train a model by asynchronous reinforcement learning.

    The configuration is checked before any process starts. Exit code 2: the configuration is invalid; 1: the run
    failed; 130: it was interrupted.

    Example: --config examples/math/gsm8k_grpo_cpu.yaml actor.backend=megatron:t2 total_train_steps=20
    """
    try:
        loaded = load(config, overrides or [])
        if not dry_run:
            raise typer.Exit(_train(loaded))
        job = check(loaded, dry_run=True)
    except ConfigError as error:
        complain(error.findings)
        raise typer.Exit(INVALID) from error
    typer.echo("All checks passed.")
    typer.echo(f"End tokens: {describe_end_tokens(job.tokenizer.backend, job.tokenizer.end_tokens)}")
    Console().print(_describe_plan(job))
    if job.sharing:
        typer.echo(job.sharing)
    if graphs := describe_graphs(job):
        typer.echo(graphs)
    if job.step_time:
        typer.echo(f"Predicted: {job.step_time}")
    if show_config:
        typer.echo(dump(loaded.config))


def _describe_plan(job: Job) -> Table:
    """Return the layout as a table, one row per engine."""
    title = Text(f"{job.plan.allocation} on {job.device}, {job.steps} steps")  # of a string, [actor] would be markup
    table = Table(title=title, title_justify="left")
    for column in ("role", "backend", "GPUs" if job.device == "cuda" else "slots", "dense grid", "expert grid"):
        table.add_column(column)
    for engine in job.plan.engines:
        sizes = engine.sizes
        dense, expert = (
            f"{sizes.dp} server{'s' if sizes.dp > 1 else ''}, tp {sizes.tp}, pp {sizes.pp}, ep {sizes.ep}",
            "",
        )
        if engine.dense and not engine.servers:
            dense = f"dp {sizes.dp}, tp {sizes.tp}, pp {sizes.pp}, cp {sizes.cp}, vpp {sizes.vpp}"
            expert = f"ep {sizes.ep}, etp {sizes.etp}, edp {sizes.edp}"
        places = ", ".join(f"{ids.start}-{ids.stop - 1}" if len(ids) > 1 else str(ids.start) for ids in engine.gpus)
        table.add_row(engine.role, engine.backend, places, dense, expert)
    return table


def _describe_end(how: str, stopped: BaseException, loaded: LoadedConfig) -> str:
    """Return the message about a run that a signal ended, with the same command, if it resumes the run."""
    lines = [f"{how}. Every process of the run has ended.", *getattr(stopped, "__notes__", ())]
    if loaded.config.recover.mode != "off":
        program = ["python"] if sys.argv[0].endswith(".py") else []
        name = [] if program else [Path(sys.argv[0]).name]
        lines.append(f"Continue with: {shlex.join([*program, *(name or sys.argv[:1]), *sys.argv[1:]])}")
    return "\n".join(lines)


def _train(loaded: LoadedConfig) -> int:
    """Train and report; returns the exit code."""
    try:
        train(loaded)
    except KeyboardInterrupt as stopped:
        complain([_describe_end("Interrupted", stopped, loaded)])
        return INTERRUPTED
    except SystemExit as stopped:
        complain([_describe_end("Terminated", stopped, loaded)])
        raise
    except RunError as error:
        complain(["\n".join([f"The run failed: {error}", *getattr(error, "__notes__", ())])])
        return FAILED
    return 0
