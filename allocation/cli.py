"""The command `allocation`: check, explain, memory, plan, count, groups, convert, format, explain-code.

Commands import only what they need: `count` takes little longer than the start of Python.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import allocation
from allocation import (
    AllocationError,
    BatchSpec,
    Cluster,
    EnginePlan,
    Finding,
    MegatronSettings,
    MemorySettings,
    ModelError,
    ModelSpec,
    Plan,
    Source,
    load_model,
)
from allocation.arguments import (
    Batch,
    ClusterSize,
    Dtype,
    FirstStage,
    GpuName,
    Json,
    LastStage,
    Model,
    NeededClusterSize,
    NeededModel,
    Order,
    Recompute,
    Words,
    system_option,
    usage,
    with_options,
)
from allocation.cases import Case, UsageError, cases, no_files, one, texts
from allocation.diagnostics import has_errors
from allocation.hardware import GPUS
from allocation.registry import run_rules
from allocation.settings import DEFAULT_TOKENS, Workload

if TYPE_CHECKING:
    from rich.console import Console

INVALID = 1
DEFAULT_SEQUENCES = 4096  # per step, without --batch: enough to fill every pipeline


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def main() -> None:
    """Compile allocation strings: engines, their parallel sizes and their GPUs.

    Quote a string that has ( ) or | in it. In place of a string, check,
    explain, count and groups take a run's YAML with key=value after it, and -
    for one string per line of standard input.

    \b
    Examples:
      allocation check 'sglang:d4t2+megatron:(attn:d2t2c2|ffn:e4)' --cluster 2x8
      allocation explain megatron:attn:d1p4t2c2/ffn:d1p4t1e4
      allocation count sglang:d4t4
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode gets `?`, not a traceback


@app.command()
def check(
    words: Words,
    model: Model = None,
    cluster: ClusterSize = None,
    batch: Batch = None,
    gpu: GpuName = None,
    order: Order = None,
    first: FirstStage = None,
    last: LastStage = None,
    as_json: Json = False,
) -> None:
    """Check allocations and report every error in one pass.

    Exit codes: 0 if all are valid (warnings allowed), 1 if there are errors, 2 for wrong usage.

    \b
    Examples:
      allocation check 'megatron:(attn:d1p4t2c2|ffn:e4)' --model qwen3-30b-a3b
      allocation check sglang:d2+megatron:d4 sglang:d4t4 -c 4x8 -b 256x8
      allocation check megatron:d2t4 --model qwen3-8b --gpu h200
      allocation check run.yaml actor.backend=megatron:t2
    """
    with usage(ModelError, "--model"):
        shape = load_model(model) if model else None
    with usage(UsageError):
        memory = MemorySettings(gpu.memory) if gpu else None
        megatron = _ends(first, last) if first or last else None
        checked = cases(words, model=shape, cluster=cluster, batch=batch, megatron=megatron, order=order, memory=memory)
    if gpu and not shape:
        raise typer.BadParameter("the memory check needs a model; add --model", param_hint="--gpu")
    if as_json:
        typer.echo(json.dumps([case.to_json() for case in checked], indent=2))
    else:
        for case in checked:
            _print_case(case)
    if any(case.plan is None for case in checked):
        raise typer.Exit(INVALID)


@app.command()
def explain(
    words: Words,
    cluster: ClusterSize = None,
    by: Annotated[str | None, typer.Option(help="Group to colour by: dp-cp, ep, pp, …")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write an SVG picture to this file.")] = None,
    order: Order = None,
) -> None:
    """Show the role and groups of each GPU in tables and pictures.

    \b
    Examples:
      allocation explain 'megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)'
      allocation explain sglang:d2t2+megatron:d2t2 --cluster 1x8 --by dp-cp
      allocation explain megatron:d16t8 --svg plan.svg
    """
    plan = _drawable(_single(words, cluster=cluster, order=order))
    from allocation.views import svg as drawn
    from allocation.views import terminal

    console = _console()
    with usage(KeyError, "--by"):
        shown = terminal.explain(plan, by, console.width)
    if svg:
        _write(svg, drawn.plan_svg(plan, by))
    console.print(shown)


@app.command()
def memory(
    words: Words,
    model: NeededModel,
    gpu: GpuName = None,
    cluster: ClusterSize = None,
    batch: Batch = None,
    length: Annotated[int | None, typer.Option(min=1, help="Maximum length of prompt and response, in tokens.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per micro-batch (max_tokens_per_mb).")] = DEFAULT_TOKENS,
    recompute: Annotated[
        Recompute, typer.Option(help="Activations to recompute in the backward pass.")
    ] = Recompute.none,
    dtype: Annotated[Dtype, typer.Option(help="Data type of the weights.")] = Dtype.bfloat16,
    sharded: Annotated[bool, typer.Option("--distributed-optimizer/--no-distributed-optimizer")] = True,
    share: Annotated[
        float,
        typer.Option(
            "--mem-fraction-static", min=0.01, max=0.99, help="Share of a GPU for SGLang's weights and KV cache."
        ),
    ] = 0.8,
    offload: Annotated[
        bool, typer.Option("--offload", help="Time-share colocated engines: the waiting engine is in host memory.")
    ] = False,
    first: FirstStage = None,
    last: LastStage = None,
    svg: Annotated[Path | None, typer.Option(help="Write an SVG picture to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Show the GPU memory of every engine, phase by phase.

    The exit code is 1 if an engine does not fit on the GPU given by --gpu.

    \b
    Examples:
      allocation memory megatron:d8t2 --model qwen3-8b --recompute full
      allocation memory 'sglang:d4t2+megatron:(attn:d2t4|ffn:e8)' -m qwen3-30b-a3b -g h100
      allocation memory 'sglang:d1|megatron:d1' -m qwen3-0.6b -g h200 --offload
    """
    from allocation.memory import estimate

    with usage(UsageError):
        no_files("memory", words)
    spec = batch or BatchSpec(DEFAULT_SEQUENCES)
    spec = replace(spec, max_length=length, max_tokens_per_mb=max(tokens, length or 0))
    settings = replace(_ends(first, last), use_distributed_optimizer=sharded, **_recompute(recompute))
    limits = MemorySettings(gpu.memory if gpu else None, dtype.value, share, offload=offload)
    with usage(ModelError, "--model"):
        work = Workload(load_model(model), settings, limits, spec)
    plan = _single(words, model=work.model, cluster=cluster, megatron=settings)
    found = estimate(plan, work)
    _report_model(work.model)
    from allocation.views import memory as drawn

    if svg:
        _write(svg, drawn.svg(found))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        _console().print(drawn.terminal(found))
    if gpu:
        _report_overflow(plan, cluster, work)


@app.command()
def plan(
    model: NeededModel,
    cluster: NeededClusterSize,
    batch: Batch = None,
    response: Annotated[int, typer.Option(min=1, help="Maximum response length, in tokens.")] = 8192,
    prompt: Annotated[int, typer.Option(min=1, help="Maximum prompt length, in tokens.")] = 1024,
    gpu: GpuName = None,
    staleness: Annotated[
        int, typer.Option(min=0, help="Staleness bound (max_head_offpolicyness); 0 is synchronous.")
    ] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per micro-batch (max_tokens_per_mb).")] = DEFAULT_TOKENS,
    top: Annotated[int, typer.Option(min=1, max=100, help="Number of layouts to show.")] = 8,
    first: FirstStage = None,
    last: LastStage = None,
    as_json: Json = False,
) -> None:
    """Find the layouts of a model on a cluster, best first, by predicted step time.

    The exit code is 1 if no layout fits. Times are estimates from data sheets and a few measurements.

    \b
    Examples:
      allocation plan --model qwen3-30b-a3b -c 4x8 -b 256x8 --response 8192
      allocation plan -m qwen3-0.6b -c 1x8 -b 128x8 --staleness 0 --gpu h200 --json
    """
    from allocation.planner import Task, asynchrony, best_on, fewest_nodes, plan_layouts, shortfall
    from allocation.views.facts import MOST_RANKS

    if cluster.n_gpus > MOST_RANKS:
        raise typer.BadParameter(f"{cluster} has {cluster.n_gpus:,} GPUs; the planner supports at most {MOST_RANKS:,}")
    with usage(ModelError, "--model"):
        shape = load_model(model)
    if 0 < shape.max_positions < (longest := prompt + response):
        problem = (
            f"prompt and response have {longest:,} tokens together; {shape.name} has {shape.max_positions:,} positions"
        )
        raise typer.BadParameter(problem, param_hint="--response")
    _report_model(shape)
    spec = replace(batch or BatchSpec(256, 8), max_tokens_per_mb=tokens)
    task = Task(shape, cluster, gpu or GPUS["h100"], spec, prompt, response, staleness, ends=(first, last))
    if not (choices := plan_layouts(task, top)):
        lines = [f"no layout of {shape.name} fits on {cluster} with {task.gpu.name}", *shortfall(task)]
        if nodes := fewest_nodes(task):
            lines.append(f"{nodes}x{cluster.n_gpus_per_node} is large enough")
        typer.echo("; ".join(lines), err=True)
        raise typer.Exit(INVALID)
    tide, more = asynchrony(task, choices[0]), best_on(task, cluster.n_nodes + 1)
    from allocation.views import planned

    if as_json:
        said = {"task": planned.title(task), "reasons": planned.reasons(task, choices[0], tide, more)}
        typer.echo(json.dumps({**said, "layouts": [one.to_json() for one in choices]}, indent=1))
    else:
        _console().print(planned.terminal(task, choices, tide, more))


def _report_model(shape: ModelSpec) -> None:
    """Print warnings about uncertain parameter counts of a model."""
    _report(run_rules(Source(shape.name), whole_model=shape))


def _report_overflow(plan: Plan, cluster: Cluster | None, work: Workload) -> None:
    checked = allocation.check(
        plan.allocation, cluster=cluster, model=work.model, batch=work.batch, megatron=work.megatron, memory=work.memory
    )
    _report([finding for finding in checked.findings if "MEMORY" in finding.code])


def _ends(first: int | None, last: int | None) -> MegatronSettings:
    return MegatronSettings(num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)


def _recompute(kind: Recompute) -> dict[str, Any]:
    full = {"recompute_method": "uniform", "recompute_num_layers": 1} if kind is Recompute.full else {}
    return {} if kind is Recompute.none else {"recompute_granularity": kind.value, **full}


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be written: {error}", param_hint="--svg") from error


@app.command()
def count(words: Words, cluster: ClusterSize = None) -> None:
    """Print only the number of GPUs.

    \b
    Examples:
      allocation count 'megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)'
      allocation count 'sglang:d4t4+megatron:d*t2' --cluster 4x8
    """
    with usage(UsageError):
        checked = cases(words, cluster=cluster)
    for case in checked:
        typer.echo(_plan(case).n_gpus)


@app.command()
def groups(
    words: Words,
    rank: Annotated[int | None, typer.Option(help="Show only the groups of this rank.")] = None,
    name: Annotated[str | None, typer.Option(help="Show only this group: tp, dp-cp, ep, …")] = None,
    role: Annotated[str | None, typer.Option(help="Show only this engine: actor, …")] = None,
    cluster: ClusterSize = None,
    order: Order = None,
    as_json: Json = False,
) -> None:
    """List the rank groups that Megatron builds, or only the groups of one rank.

    \b
    Examples:
      allocation groups 'megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)' --rank 13
      allocation groups megatron:d4t2 --name tp
      allocation groups sglang:d2t2+megatron:d4 --role actor --json
    """
    from allocation.views.facts import engines_with, groups_of, rank_groups

    engines = _drawable(_single(words, cluster=cluster, order=order)).engines
    if role is not None:
        engines = _some((e for e in engines if e.role == role), f"unknown role {role}", "--role")
    if rank is not None:
        engines = _some((e for e in engines if 0 <= rank < e.world_size), f"no engine has a rank {rank}", "--rank")
    if name is not None:
        with usage(KeyError, "--name"):
            engines = engines_with(name, engines)
    if as_json:
        found = {e.role: rank_groups(e) if rank is None else groups_of(e, rank) for e in engines}
        chosen = {role: {k: v for k, v in groups.items() if name in (None, k)} for role, groups in found.items()}
        typer.echo(json.dumps(chosen, default=lambda array: array.tolist()))
        return
    from allocation.views.terminal import groups_list, partners

    for engine in engines:
        _console().print(groups_list(engine, name) if rank is None else partners(engine, rank, name))


@app.command()
def convert(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="ALLOCATION|SETTINGS", help="An allocation, or with --from a file, - or the settings themselves."
        ),
    ],
    source: Annotated[str | None, system_option("--from", "System whose settings are read.")] = None,
    target: Annotated[str | None, system_option("--to", "System whose settings are written.")] = None,
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
        _report(findings)
        words = [text]
    if target is not None:
        text, findings = write(target, _single(words, cluster=cluster))
        _report(findings)
    typer.echo(text.rstrip("\n"))


@app.command("format")
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
            _report(error.findings)


@app.command("explain-code")
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


def _single(words: Sequence[str], **options: Any) -> Plan:
    """Return the plan of the one allocation that the words contain."""
    with usage(UsageError):
        return _plan(one(words, **options))


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


def _plan(case: Case) -> Plan:
    """Return the plan. Without one, print the findings on stderr and exit."""
    if case.plan is None:
        _report(case.findings)
        raise typer.Exit(INVALID)
    return case.plan


def _drawable(plan: Plan) -> Plan:
    from allocation.views.facts import MOST_RANKS

    if plan.n_gpus > MOST_RANKS:
        raise typer.BadParameter(f"{plan.n_gpus:,} GPUs are too many to list one by one; the limit is {MOST_RANKS:,}")
    return plan


def _some(engines: Iterable[EnginePlan], problem: str, option: str) -> tuple[EnginePlan, ...]:
    if not (found := tuple(engines)):
        raise typer.BadParameter(problem, param_hint=option)
    return found


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _print_case(case: Case) -> None:
    from allocation.views.terminal import finding_text, verdict

    checked_with = [f"  checked with {case.checked_with}"] if case.checked_with else []
    for line in (verdict(case.label, case.plan), *checked_with, *map(finding_text, map(with_options, case.findings))):
        _console().print(line, soft_wrap=True)


def _report(findings: Sequence[Finding]) -> None:
    """Print findings on stderr, and exit if one of them is an error."""
    if findings:
        from allocation.views.terminal import finding_text

        for finding in findings:
            _console(stderr=True).print(finding_text(with_options(finding)), soft_wrap=True)
    if has_errors(findings):
        raise typer.Exit(INVALID)
