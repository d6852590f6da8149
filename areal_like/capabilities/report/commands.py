"""The commands `areal-like samples`, `areal-like report` and `areal-like watch`."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from areal_like.metrics.samples import SampleRow

Directory = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run: fileroot/experiment/trial.")]


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
    from areal_like.exits import exit_on_error, refuse
    from areal_like.metrics.lines import as_json
    from areal_like.metrics.samples import by_reward, list_written, pick, read_samples

    _is_run(directory)
    there = [number for number, name in list_written(directory) if name == evaluation]
    if not there:
        what = f"evaluation of {evaluation}" if evaluation else "training step"
        refuse(f"{directory} has no samples of any {what}; see stats_logger.samples")
    step = there[-1] if step is None else step
    if step not in there:
        refuse(f"{directory} holds no samples of step {step}; it has {', '.join(map(str, there[-20:]))}")
    with exit_on_error():
        found = read_samples(directory, step, evaluation)
    chosen = [*by_reward(found)[:worst], *by_reward(found, best_first=True)[:best]]
    chosen = chosen if worst or best else pick(found, 5)
    if json_lines:
        typer.echo("\n".join(map(as_json, chosen)))
        return
    typer.echo(f"step {step}: {_summary(found)}")
    for sample in chosen:
        typer.echo(_describe(sample))


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
    from areal_like.capabilities.report.page import REPORT_FILE
    from areal_like.capabilities.report.write import chrome_trace, write_report
    from areal_like.exits import exit_on_error, refuse
    from areal_like.metrics.lines import replacing

    if trace is not None and len(runs) > 1:
        refuse("--trace needs exactly one run. Name one.")
    for run in runs:
        _is_run(run)
    output = output or (runs[0] / REPORT_FILE if len(runs) == 1 else Path("comparison.html"))
    for file in filter(None, (output, trace)):
        if file.is_dir() or not file.parent.is_dir():
            refuse(
                f"{file} cannot be written: {'it is a directory' if file.is_dir() else 'its directory does not exist'}"
            )
    with exit_on_error(), ExitStack() as whole:  # nothing is replaced unless all could be read and written
        if trace is not None:
            whole.enter_context(replacing(trace)).write_text(json.dumps(chrome_trace(runs[0])))
        write_report(runs, output)
    typer.echo(f"file://{output.absolute()}")


def watch(
    directory: Directory,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of loopback; 0: any free one.")] = 8600,
) -> None:
    """Serve the page of a run that goes on or has ended; it updates itself. Ctrl-C ends it.

    The server is on loopback, and the printed address contains a token.

    \b
    Examples:
      areal-like watch runs/gsm8k/first
      areal-like watch runs/gsm8k/first --port 8601
    """
    import socket
    from contextlib import suppress

    from areal_like.capabilities.report.watch import serve
    from areal_like.exits import exit_on_error, refuse

    def show(address: str, at: int) -> None:
        typer.echo(f"{address}\nFrom another machine: ssh -L {at}:127.0.0.1:{at} {socket.gethostname()}")

    _is_run(directory)
    with exit_on_error(), suppress(KeyboardInterrupt):
        try:
            serve(directory, port, show)
        except OSError as error:
            if error.filename is None:
                refuse(f"port {port} of loopback cannot be served: {error.strerror}. Use --port with another one")
            raise


def _is_run(directory: Path) -> None:
    from areal_like.exits import refuse
    from areal_like.metrics.names import ABOUT_FILE

    if not (directory / ABOUT_FILE).is_file():
        refuse(f"{directory} is not the directory of a run: {directory / ABOUT_FILE} is missing")


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


COMMANDS = {"samples": samples, "report": report, "watch": watch}
