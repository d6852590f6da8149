"""The command `areal-like`, also as `python -m areal_like`: run, check, and inspect runs.

Each command imports its modules beyond typer itself, so that `--help` answers at once, and `areal-like` names the
missing packages if only the compiler is installed.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from areal_like.core.registry import find_modules
from areal_like.exits import refuse

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
        str | None, typer.Option(metavar="NAME_OR_DIRECTORY", help="Check whether this model trains, instead of a run.")
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


@app.command("explain-code")
def explain_code(
    code: Annotated[str, typer.Argument(metavar="CODE", help="The code in brackets, such as RUN-MEGATRON-CONTEXT.")],
) -> None:
    """Explain the code of a finding: cause, example and fix.

    Exit code 2: no finding has this code; the nearest codes are named.

    \b
    Examples:
      areal-like explain-code RUN-MEGATRON-CONTEXT
      areal-like explain-code ALLOC-HEADS
    """
    from allocation.codes import UnknownCode, find
    from areal_like.codes import explanations

    try:
        found = find(code, explanations())
    except UnknownCode as error:
        raise typer.BadParameter(str(error), param_hint="CODE") from error
    typer.echo(found)
    try:
        from areal_like.exclusions import describe_rows
        from areal_like.preflight.exclusions import exclusion_table
    except ModuleNotFoundError as error:
        typer.echo(f"\nThe features that exclude each other are not listed: the package {error.name} is not installed")
        return
    for pair, because, _ in describe_rows(exclusion_table(), found.code):
        typer.echo(f"\nNot {pair}: {because}")


for _, module in find_modules("commands"):
    for name, function in module.COMMANDS.items():
        app.command(name)(function)

if __name__ == "__main__":
    main()
