"""The command `areal-like`: run, check, and inspect runs.

Each command imports its modules beyond typer itself, so that `--help` answers at once, and `areal-like` names the
missing packages if only the compiler is installed.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from areal_like.registry import find_modules

if TYPE_CHECKING:
    from areal_like.metrics.samples import SampleRow

UNREADABLE = 2

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Asynchronous reinforcement learning of language models.

    Start with check, which starts no process; then run. Inspect running or finished jobs with samples and report.

    \b
    Examples:
      areal-like check examples/math/gsm8k_grpo_cpu.yaml
      areal-like run examples/math/gsm8k_grpo_cpu.yaml
      areal-like report runs/gsm8k/first
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
    if model is not None:
        if config is not None:
            _refuse("check takes FILE or --model, not both")
        _check_model(model, backend)
    elif config is None:
        _refuse("check needs the YAML file of a run, or --model NAME_OR_DIRECTORY")
    elif backend is not None:
        _refuse(f"--backend needs --model; a run's trainer is set by actor.backend={backend}:d1 or another layout")
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


@app.command()
def samples(
    directory: Directory,
    step: Annotated[int | None, typer.Option(help="Training step (default: the last one).")] = None,
    worst: Annotated[int, typer.Option(min=0, help="Number of samples with the smallest rewards.")] = 0,
    best: Annotated[int, typer.Option(min=0, help="Number of samples with the largest rewards.")] = 0,
    evaluation: Annotated[
        str | None, typer.Option(help="Samples of this evaluation set, such as valid_dataset.")
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one line of JSON per sample.")] = False,
) -> None:
    """Show prompts, responses and rewards of a step: five of them, or as many as --worst and --best ask for.

    \b
    Examples:
      areal-like samples runs/gsm8k/first --step 40 --worst 5
      areal-like samples runs/gsm8k/first --evaluation valid_dataset --json
    """
    from areal_like.metrics.lines import as_json
    from areal_like.metrics.samples import by_reward, list_written, pick, read_samples

    _is_run(directory)
    there = [number for number, name in list_written(directory) if name == evaluation]
    if not there:
        what = f"evaluation of {evaluation}" if evaluation else "training step"
        _refuse(f"{directory} has no samples of any {what}; see stats_logger.samples")
    step = there[-1] if step is None else step
    if step not in there:
        _refuse(f"{directory} holds no samples of step {step}; it has {', '.join(map(str, there[-20:]))}")
    with _exit_on_error():
        found = read_samples(directory, step, evaluation)
    chosen = [*by_reward(found)[:worst], *by_reward(found, best_first=True)[:best]]
    chosen = chosen if worst or best else pick(found, 5)
    if json_lines:
        typer.echo("\n".join(map(as_json, chosen)))
        return
    typer.echo(f"step {step}: {_summary(found)}")
    for sample in chosen:
        typer.echo(_describe(sample))


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN ...", help="Directories of runs; several are compared in one page.")
    ],
    output: Annotated[Path | None, typer.Option(help="File to write.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Also write a Chrome trace (ui.perfetto.dev) of one run to this file.")
    ] = None,
) -> None:
    """Write a page that shows one run or compares several: curves, timeline, samples, layout, configuration.

    A run keeps its own report.html up to date; this command rewrites it from the run's files. The default output is
    report.html in the run's directory, and comparison.html in the current directory for several runs.

    \b
    Examples:
      areal-like report runs/gsm8k/first --trace trace.json
      areal-like report runs/gsm8k/a runs/gsm8k/b --output both.html
    """
    from areal_like.metrics.lines import replacing
    from areal_like.metrics.report import REPORT_FILE, chrome_trace, write_report

    if trace is not None and len(runs) > 1:
        _refuse("--trace needs exactly one run. Name one.")
    for run in runs:
        _is_run(run)
    output = output or (runs[0] / REPORT_FILE if len(runs) == 1 else Path("comparison.html"))
    for file in filter(None, (output, trace)):
        if file.is_dir() or not file.parent.is_dir():
            _refuse(
                f"{file} cannot be written: {'it is a directory' if file.is_dir() else 'its directory does not exist'}"
            )
    with _exit_on_error(), ExitStack() as whole:  # nothing is replaced unless all could be read and written
        if trace is not None:
            whole.enter_context(replacing(trace)).write_text(json.dumps(chrome_trace(runs[0])))
        write_report(runs, output)
    typer.echo(f"file://{output.absolute()}")


def _is_run(directory: Path) -> None:
    from areal_like.metrics.report import ABOUT_FILE

    if not (directory / ABOUT_FILE).is_file():
        _refuse(f"{directory} is not the directory of a run: {directory / ABOUT_FILE} is missing")


def _summary(samples: "list[SampleRow]") -> str:
    judged = [sample["reward"] for sample in samples if sample["reward"] is not None]
    mean = f"mean reward {sum(judged) / len(judged):.3f}" if judged else "no rewards"
    missing = f", {len(samples) - len(judged)} without a reward" if len(judged) < len(samples) else ""
    return f"{len(samples)} samples, {mean}{missing}"


def _describe(sample: "SampleRow") -> str:
    from areal_like.metrics.samples import escape, reward_of

    versions = ", ".join(str(version) for version, _ in sample["versions"])
    parts = "".join(f" · {name} {_number(value)}" for name, value in sample["parts"].items())
    about = f"group {sample['group']} · {sample['tokens']} tokens · {sample['finish_reason']} · versions {versions}"
    head = f"\n--- {reward_of(sample)}{parts} · {about}"
    return f"{head}\nprompt:   {escape(sample['prompt'])}\nresponse: {escape(sample['response'])}"


def _number(value: float | None) -> str:
    return "missing" if value is None else f"{value:g}"


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """Exit with a message if the body cannot read or write the files of a run."""
    from areal_like.errors import RunError

    try:
        yield
    except RunError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename} cannot be used: {error.strerror}" if error.filename else str(error))


def _refuse(message: str) -> NoReturn:
    from areal_like.metrics.console import complain

    complain([f"error: {message}"])
    raise typer.Exit(UNREADABLE)


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
    from areal_like.interop.convert_checkpoint import convert

    if (target is None) != audit:
        _refuse("Name a TARGET, or use --audit.")
    with _exit_on_error():
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
    from areal_like.interop.dequantize import dequantize

    with _exit_on_error():
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
    from areal_like.config.codes import explanations
    from areal_like.exclusions import describe_rows
    from areal_like.preflight.exclusion_table import exclusion_table

    try:
        found = find(code, explanations())
    except UnknownCode as error:
        raise typer.BadParameter(str(error), param_hint="CODE") from error
    typer.echo(found)
    for pair, because, _ in describe_rows(exclusion_table(), found.code):
        typer.echo(f"\nNot {pair}: {because}")


for _, module in find_modules("commands"):
    for name, function in module.COMMANDS.items():
        app.command(name)(function)
