"""Output that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from allocation import Finding, MegatronSettings, Plan
from allocation.cases import Case, UsageError, one
from allocation.cli.arguments import usage, with_options
from allocation.diagnostics import has_errors

if TYPE_CHECKING:
    from rich.console import Console

INVALID = 1


def single(words: Sequence[str], **options: Any) -> Plan:
    """Return the plan of the one allocation that the words contain."""
    with usage(UsageError):
        return valid_plan(one(words, **options))


def valid_plan(case: Case) -> Plan:
    """Return the plan. Without one, print the findings on stderr and exit."""
    if case.plan is None:
        report(case.findings)
        raise typer.Exit(INVALID)
    return case.plan


def drawable(plan: Plan) -> Plan:
    """Return a plan whose GPUs can be listed one by one; reject a larger one."""
    from allocation.views.facts import MOST_RANKS

    if plan.n_gpus > MOST_RANKS:
        raise typer.BadParameter(f"{plan.n_gpus:,} GPUs are too many to list one by one; the limit is {MOST_RANKS:,}")
    return plan


def ends(first: int | None, last: int | None) -> MegatronSettings:
    """Return settings with so many layers on the first and the last pipeline stage."""
    return MegatronSettings(num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)


def write_picture(file: Path, text: str) -> None:
    """Write a picture to the file of `--svg`."""
    try:
        file.write_text(text)
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be written: {error}", param_hint="--svg") from error


def open_console(*, stderr: bool = False) -> Console:
    """Return a console of standard output or standard error."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def report(findings: Sequence[Finding]) -> None:
    """Print findings on stderr, and exit if one of them is an error."""
    if findings:
        from allocation.views.terminal import finding_text

        for finding in findings:
            open_console(stderr=True).print(finding_text(with_options(finding)), soft_wrap=True)
    if has_errors(findings):
        raise typer.Exit(INVALID)
