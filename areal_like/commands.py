"""The command `areal-like`: run, check, and inspect runs.

Each command imports its modules beyond typer itself, so that `--help` answers at once, and `areal-like` names the
missing packages if only the compiler is installed.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from areal_like.registry import find_modules

UNREADABLE = 2

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Asynchronous reinforcement learning of language models.

    Start with check, which starts no process; then run.

    \b
    Examples:
      areal-like check examples/math/gsm8k_grpo_cpu.yaml
      areal-like run examples/math/gsm8k_grpo_cpu.yaml
    """,
)
Config = Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value ...", help="Overrides of the file.")]
Directory = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run: fileroot/experiment/trial.")]


def main() -> None:
    """Run the command `areal-like`; report a missing package by name."""
    try:
        app()
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        way = "run `make setup`, or `uv sync --extra cpu`, in the source directory"
        print(f"error[RUN-PACKAGE]: the package {package} is not installed\n  help: {way}", file=sys.stderr)
        sys.exit(UNREADABLE)


@app.command()
def run(config: Config, overrides: Overrides = None) -> None:
    """Check a configuration and train.

    Exit code 2: the configuration is invalid; 1: the run failed; 130: it was interrupted.

    \b
    Examples:
      areal-like run examples/math/gsm8k_grpo_cpu.yaml
      areal-like run examples/math/gsm8k_grpo_cpu.yaml actor.backend=megatron:t2
    """
    from areal_like.cli import main as script

    script(config, overrides, dry_run=False, show_config=False)


@app.command()
def check(
    config: Annotated[Path | None, typer.Argument(metavar="FILE", help="YAML file of the run.")] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME_OR_DIRECTORY", help="Check whether this model trains, instead of a run."),
    ] = None,
    backend: Annotated[
        Literal["megatron", "fsdp"] | None, typer.Option(help="With --model: consider this trainer only.")
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the whole configuration too, with all defaults.")
    ] = False,
) -> None:
    """Check everything that a run needs, and print the verdict and its layout. Starts and writes nothing.

    With --model: report which trainers support a model, and where SGLang serves it, without a network. Exit code 1: no
    trainer takes it, with the reasons.

    \b
    Examples:
      areal-like check examples/math/gsm8k_grpo_cpu.yaml
      areal-like check examples/math/gsm8k_grpo_cpu.yaml rollout.backend=sglang:d2
      areal-like check --model Qwen/Qwen3-8B
      areal-like check --model Qwen/Qwen3-30B-A3B --backend fsdp
    """
    from areal_like.exits import refuse

    if model is not None:
        if config is not None:
            refuse("check takes FILE or --model, not both")
        _check_model(model, backend)
    elif config is None:
        refuse("check needs the YAML file of a run, or --model NAME_OR_DIRECTORY")
    elif backend is not None:
        refuse(f"--backend needs --model; a run's trainer is set by actor.backend={backend}:d1 or another layout")
    else:
        from areal_like.cli import main as script

        script(config, overrides, dry_run=True, show_config=show_config)


def _check_model(model: str, backend: Literal["megatron", "fsdp"] | None) -> None:
    """Print which trainers support a model, and where it is served; exit with 1 if none takes it."""
    from allocation.diagnostics import has_errors
    from areal_like.metrics.console import complain
    from areal_like.preflight.trainable import check_trainable

    answer = check_trainable(model, backend)
    if answer.spec is not None and answer.trainers:
        source = " (sizes from the offline table; check the directory after the download)" if answer.from_table else ""
        typer.echo(f"{answer.spec.name}: {answer.family}{source}")
        for name, findings in answer.trainers.items():
            verdict = "no, see below" if has_errors(findings) else "trains, see below" if findings else "trains"
            typer.echo(f"{name}: {verdict}")
        for name, served in answer.servers.items():
            typer.echo(f"{name}: {served}")
    if answer.instead:
        typer.echo(f"Another trainer supports the model: --backend {answer.instead}")
    complain(dict.fromkeys([*answer.findings, *(found for each in answer.trainers.values() for found in each)]))
    raise typer.Exit(0 if answer.trains else 1)


@app.command("convert-checkpoint")
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
        list[str] | None,
        typer.Option(help="Hugging Face tensors to leave out: names, where * matches any text."),
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
    from areal_like.exits import exit_on_error, refuse
    from areal_like.interop.convert_checkpoint import convert

    if (target is None) != audit:
        refuse("Name a TARGET, or use --audit.")
    with exit_on_error():
        said = convert(source, target, bridge=bridge, model=model, dtype=dtype, leave_out=leave_out or ())
    typer.echo(said if target is None else f"{said}\n{target}")


@app.command("dequantize")
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
    from areal_like.exits import exit_on_error
    from areal_like.interop.dequantize import dequantize

    with exit_on_error():
        said = dequantize(source, target)
    typer.echo(f"{said}\n{target}")


@app.command()
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


@app.command("explain-code")
def explain_code(
    code: Annotated[str, typer.Argument(metavar="CODE", help="The code in brackets, such as RUN-MEGATRON-CP-COMM.")],
) -> None:
    """Explain the code of a finding: cause, example and fix.

    Exit code 2: no finding has this code; the nearest codes are named.

    \b
    Examples:
      areal-like explain-code RUN-MEGATRON-CP-COMM
      areal-like explain-code ALLOC-HEADS
    """
    from allocation.codes import UnknownCode, find
    from areal_like.config.codes import explanations

    try:
        typer.echo(find(code, explanations()))
    except UnknownCode as error:
        raise typer.BadParameter(str(error), param_hint="CODE") from error


for _, module in find_modules("commands"):
    for name, function in module.COMMANDS.items():
        app.command(name)(function)
