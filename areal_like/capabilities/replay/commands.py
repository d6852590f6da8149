"""The commands `areal-like replay` and `areal-like diff`."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from areal_like.capabilities.replay.verdicts import ReplayVerdict

DIFFERENT, UNREADABLE = 1, 2
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run: fileroot/experiment/trial.")]


def replay(
    run: Run,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value ...", help="Settings to change: a layout, or training.")
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", min=1, help="Step to compute again.")] = None,
    steps: Annotated[str | None, typer.Option(metavar="N:M", help="Steps to compute again, such as 40:60.")] = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(metavar="K", min=0, help="Leave out trajectories with tokens that are more versions old."),
    ] = None,
    log_probs: Annotated[
        bool, typer.Option("--log-probs", help="Also compare every token's log-prob with the weights of its version.")
    ] = False,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Also start servers, and evaluate both trainings after the last step.")
    ] = False,
) -> None:
    """Compute recorded training steps again, without servers, and compare them with the record.

    The run needs `recover.replay=true`. With settings of training, such as `actor.optimizer.lr=1e-5`, the recorded
    trajectories are trained with these settings, and the report shows where the two runs part; with `--evaluate` also
    the evaluation rewards of both. Without a step, the record and the checkpoints are searched for faults, and nothing
    is computed. Exit code 1: a difference or a fault.

    \b
    Examples:
      areal-like replay runs/gsm8k/first --step 812
      areal-like replay runs/gsm8k/first --step 812 actor.backend=megatron:d1
      areal-like replay runs/gsm8k/first --steps 800:820 actor.eps_clip=0.1
      areal-like replay runs/gsm8k/first --steps 800:820 --max-staleness 1
      areal-like replay runs/gsm8k/first --steps 800:820 actor.eps_clip=0.1 --evaluate
      areal-like replay runs/gsm8k/first
    """
    from areal_like.capabilities.replay import verdicts

    first, last = _steps(step, steps)
    if first is None or last is None:
        if overrides or max_staleness is not None or log_probs or evaluate:
            _refuse("Overrides, --max-staleness, --log-probs and --evaluate need steps. Name --step N or --steps N:M.")
        _show(lambda: verdicts.audit(run))
        return

    span, options = (first, last), {"log_probs": log_probs, "evaluates": evaluate}
    _show(lambda: _compute(run, span, overrides or (), max_staleness, **options))


def _compute(
    run: Path,
    steps: tuple[int, int],
    overrides: Sequence[str],
    max_staleness: int | None,
    *,
    log_probs: bool,
    evaluates: bool,
) -> "ReplayVerdict":
    """Compute steps again, with other settings if there are any."""
    from areal_like.capabilities.replay import verdicts

    asked = verdicts.ask(run, *steps, overrides, partial(typer.echo, err=True), evaluates=evaluates)
    if asked.changes or max_staleness is not None:
        if log_probs:
            _refuse("--log-probs compares with the record, not with other settings. Leave it out.")
        return asyncio.run(verdicts.counterfactual(asked, max_staleness))
    if evaluates:
        _refuse("--evaluate compares two trainings. Override a setting of training, or pass --max-staleness K.")
    return asyncio.run(verdicts.verify(asked, log_probs=log_probs))


def diff(
    one: Annotated[Path, typer.Argument(metavar="RUN_A", help="Directory of a run with recorded steps.")],
    other: Annotated[Path, typer.Argument(metavar="RUN_B", help="Directory of another one.")],
) -> None:
    """Name the first step and the first quantity in which two recorded runs differ. Exit code 1: they differ.

    \b
    Examples:
      areal-like diff runs/gsm8k/first runs/gsm8k/second
    """
    from areal_like.capabilities.replay import verdicts

    _show(lambda: verdicts.compare_runs(one, other))


def _steps(step: int | None, steps: str | None) -> tuple[int | None, int | None]:
    """Return the first and the last step that the options name."""
    if step is not None and steps is not None:
        _refuse("--step and --steps exclude each other. Name one of them.")
    if steps is None:
        return step, step
    first, colon, last = steps.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        _refuse(f"--steps {steps} is not a range of steps. Write --steps 40:60 for steps 40 to 60.")
    return int(first), int(last)


def _show(work: "Callable[[], ReplayVerdict]") -> None:
    """Print a verdict, its warnings and its table; exit with 1 unless it is good."""
    from rich.console import Console
    from rich.table import Table

    from areal_like.core.config.findings import ConfigError
    from areal_like.core.errors import RunError
    from areal_like.metrics.console import complain

    try:
        verdict = work()
    except ConfigError as error:
        complain(error.findings)
        raise typer.Exit(UNREADABLE) from error
    except (RunError, ExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        if not isinstance(first, RunError):
            raise
        _refuse("\n".join([str(first), *getattr(error, "__notes__", ())]), error)
    typer.echo(verdict.text)
    complain([f"warning: {text}" for text in verdict.warnings])
    if verdict.rows:
        table = Table(*verdict.columns)
        for row in verdict.rows:
            table.add_row(*row)
        Console(width=None if Console().is_terminal else 200, markup=False).print(table)
    for line in verdict.lines:
        typer.echo(line)
    if not verdict.good:
        raise typer.Exit(DIFFERENT)


def _refuse(message: str, cause: BaseException | None = None) -> NoReturn:
    from areal_like.metrics.console import complain

    complain([f"error: {message}"])
    raise typer.Exit(UNREADABLE) from cause


COMMANDS = {"replay": replay, "diff": diff}
