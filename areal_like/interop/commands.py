"""The commands that read other systems' files: `convert-checkpoint`, `dequantize` and `migrate`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from areal_like.exits import exit_on_error, refuse


def convert_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="Hugging Face or Megatron checkpoint, a run's directory, or its recover/step-N."
        ),
    ],
    target: Annotated[
        Path | None, typer.Argument(metavar="TARGET", help="Directory to create; not with --audit.")
    ] = None,
    audit: Annotated[bool, typer.Option("--audit", help="Report whether it can be converted; write nothing.")] = False,
    bridge: Annotated[
        Literal["mbridge", "megatron-bridge"] | None,
        typer.Option(help="Bridge to use (default: the first that supports the model)."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Directory with config and tokenizer, for a Megatron checkpoint without them.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Data type of the converted Megatron weights (default: as in SOURCE)."),
    ] = None,
    leave_out: Annotated[
        list[str] | None, typer.Option(help="Hugging Face tensors to leave out: names, where * matches any text.")
    ] = None,
) -> None:
    """Convert Hugging Face weights to a Megatron distributed checkpoint, or the other way round.

    One CPU process converts any layout. Every tensor is mapped exactly once; otherwise the command lists the unmapped
    names, writes nothing and exits with code 2.

    \b
    Examples:
      areal-like convert-checkpoint models/qwen3 models/qwen3-megatron
      areal-like convert-checkpoint runs/gsm8k/first policy
    """
    from areal_like.interop.convert_checkpoint import convert

    if (target is None) != audit:
        refuse("Name a TARGET, or use --audit.")
    with exit_on_error():
        said = convert(source, target, bridge=bridge, model=model, dtype=dtype, leave_out=leave_out or ())
    typer.echo(said if target is None else f"{said}\n{target}")


def dequantize_checkpoint(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Directory of a checkpoint in FP8 or MXFP4.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Directory to create.")],
) -> None:
    """Write a quantized Hugging Face checkpoint with bfloat16 weights, which a run can train.

    One CPU process converts tensor by tensor. Layers for multi-token prediction are left out. Exit code 2: nothing is
    written, and the reason is given.

    \b
    Examples:
      areal-like dequantize models/gpt-oss-20b models/gpt-oss-20b-bf16
      areal-like dequantize models/deepseek-v3 models/deepseek-v3-bf16
    """
    from areal_like.interop.dequantize import dequantize

    with exit_on_error():
        said = dequantize(source, target)
    typer.echo(f"{said}\n{target}")


def migrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML or a launch script; - for standard input.")],
    system: Annotated[
        str | None, typer.Option(help="areal, verl, siirl, trinity, roll or slime; else by its keys.")
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Exit with 0 even if training changes, unless a value is `???`.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List the renamed and the unnecessary keys too.")
    ] = False,
) -> None:
    """Write another system's configuration as a run's YAML to standard output.

    The verdict on stderr comes first, then the keys that change training, values that you must set (`???` in the YAML)
    and values that the run's checks refuse. Scripts are read and never run. The exit code is 0 if the run trains as the
    configuration does, and 1 if training changes (see --accept), a value is `???` or refused, or the input is not read
    in full.

    \b
    Examples:
      areal-like migrate run_qwen3_grpo.sh > run.yaml
      areal-like migrate gsm8k_grpo_megatron.yaml --system areal --verbose
    """
    from areal_like.interop.checks import find_refusals
    from areal_like.interop.keys import TITLES
    from areal_like.interop.migrate import migrate as read

    if system is not None and system not in TITLES:
        raise typer.BadParameter(f"{system!r} is not one of {', '.join(TITLES)}", param_hint="--system")
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}", param_hint="FILE") from error
    done = read(text, system)
    if done.yaml:
        done.refused = find_refusals(done.yaml)
    typer.echo(done.report(verbose=verbose), err=True)
    typer.echo(done.yaml, nl=False)
    if done.changes and not accept:
        typer.echo("error: the run trains differently. Use --accept if you accept the changes above.", err=True)
    if done.problems or done.missing or done.refused or (done.changes and not accept):
        raise typer.Exit(1)


COMMANDS = {"convert-checkpoint": convert_checkpoint, "dequantize": dequantize_checkpoint, "migrate": migrate}
