"""Commands that translate: convert, format and explain-code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import allocation
from allocation import AllocationError
from allocation.cases import UsageError, texts
from allocation.cli.arguments import ClusterSize, usage
from allocation.cli.output import report, single


def _systems(incomplete: str = "") -> list[str]:
    from allocation.convert import SYSTEMS

    return [name for name in SYSTEMS if name.startswith(incomplete)]


def _system(name: str) -> str:
    if name not in _systems():
        raise typer.BadParameter(f"unknown system {name!r}; the systems are {', '.join(_systems())}")
    return name


def _system_option(name: str, help: str) -> Any:
    return typer.Option(name, parser=_system, metavar="SYSTEM", help=help, autocompletion=_systems)


def convert(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="ALLOCATION|SETTINGS", help="An allocation, or with --from a file, - or the settings themselves."
        ),
    ],
    source: Annotated[str | None, _system_option("--from", "System whose settings are read.")] = None,
    target: Annotated[str | None, _system_option("--to", "System whose settings are written.")] = None,
    cluster: ClusterSize = None,
) -> None:
    """Convert an allocation to another system's settings, or settings to an allocation.

    Anything without an equivalent in the other system is listed on stderr.

    \b
    Examples:
      allocation convert 'megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)' --to megatron
      allocation convert run.sh --from megatron
      allocation convert 'sglang.d4p1t1+d2p2t1' --from areal-legacy --to verl
    """
    if source is None and target is None:
        raise typer.BadParameter("write --from SYSTEM, --to SYSTEM, or both")
    from allocation.convert import read, write

    if source is not None:
        text, findings = read(source, _settings(words))
        report(findings)
        words = [text]
    if target is not None:
        text, findings = write(target, single(words, cluster=cluster))
        report(findings)
    typer.echo(text.rstrip("\n"))


def format_(
    words: Annotated[
        list[str], typer.Argument(metavar="ALLOCATION", help="Allocation strings, or - for standard input.")
    ],
    shell: Annotated[
        bool, typer.Option("--shell", help="Use the spelling that needs the fewest quotes in a shell.")
    ] = False,
) -> None:
    """Print allocations in their canonical spelling.

    \b
    Examples:
      allocation format 'megatron : t2d4'
      allocation format --shell 'megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)'
    """
    with usage(UsageError):
        asked = texts(words)
    for text in asked:
        try:
            typer.echo(allocation.format(text, shell=shell))
        except AllocationError as error:
            report(error.findings)


def explain_code(
    code: Annotated[str, typer.Argument(metavar="CODE", help="The code in brackets, such as ALLOC-HEADS.")],
) -> None:
    """Explain the code of a finding: cause, example and fix.

    Codes of runs (RUN-, CONFIG-) are explained by `areal-like explain-code`. Exit code 2: no rule has this code; the
    nearest codes are named.

    \b
    Examples:
      allocation explain-code ALLOC-HEADS
    """
    from allocation.codes import UnknownCode, explanations, find

    if code.upper().startswith(("RUN-", "CONFIG-")):
        raise typer.BadParameter(f"{code} is a code of runs: areal-like explain-code {code}", param_hint="CODE")
    with usage(UnknownCode, "CODE"):
        typer.echo(find(code, explanations()))


def _settings(words: Sequence[str]) -> str:
    """Return another system's settings: the content of a file, standard input, or the words themselves."""
    text = " ".join(words)
    if text == "-":
        return sys.stdin.read()
    if not (os.path.exists(text) or re.fullmatch(r"[^\s=]+\.(?:ya?ml|sh)", text)):
        return text
    try:
        return Path(text).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{text} cannot be read: {error}") from error
