"""Commands that predict: memory and plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import allocation
from allocation import BatchSpec, Cluster, MemorySettings, ModelError, ModelSpec, Plan, Source, load_model
from allocation.cases import UsageError, no_files
from allocation.cli.arguments import (
    Batch,
    ClusterSize,
    Dtype,
    FirstStage,
    GpuName,
    Json,
    LastStage,
    MaxLength,
    NeededClusterSize,
    NeededModel,
    Offload,
    OptimizerOffload,
    Picture,
    Recompute,
    RecomputeKind,
    ServerShare,
    Sharded,
    Tokens,
    WeightDtype,
    Words,
    usage,
)
from allocation.cli.output import INVALID, ends, open_console, report, single, write_picture
from allocation.hardware import GPUS
from allocation.registry import run_rules
from allocation.settings import DEFAULT_TOKENS, Workload

if TYPE_CHECKING:
    from allocation.memory import Estimate
    from allocation.planner.choice import Choice
    from allocation.planner.task import Task

DEFAULT_SEQUENCES = 4096  # per step, without --batch: enough to fill every pipeline


def memory(
    words: Words,
    model: NeededModel,
    gpu: GpuName = None,
    cluster: ClusterSize = None,
    batch: Batch = None,
    length: MaxLength = None,
    tokens: Tokens = DEFAULT_TOKENS,
    recompute: RecomputeKind = Recompute.none,
    dtype: WeightDtype = Dtype.bfloat16,
    sharded: Sharded = True,
    share: ServerShare = 0.8,
    offload: Offload = False,
    on_host: OptimizerOffload = False,
    first: FirstStage = None,
    last: LastStage = None,
    svg: Picture = None,
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
    settings = replace(
        ends(first, last), use_distributed_optimizer=sharded, optimizer_offload=on_host, **_recompute(recompute)
    )
    limits = MemorySettings(gpu.memory if gpu else None, dtype.value, share, offload=offload)
    with usage(ModelError, "--model"):
        work = Workload(load_model(model), settings, limits, spec)
    plan = single(words, model=work.model, cluster=cluster, megatron=settings)
    _report_model(work.model)
    _show_memory(estimate(plan, work), svg, as_json)
    if gpu:
        _report_overflow(plan, cluster, work)


def _show_memory(found: Estimate, svg: Path | None, as_json: bool) -> None:
    """Write the picture if a file is named, and print the table or JSON."""
    from allocation.views import memory as drawn

    if svg:
        write_picture(svg, drawn.svg(found))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        open_console().print(drawn.terminal(found))


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
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per micro-batch (max_tokens_per_mb); by default several are tried."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=100, help="Number of layouts to show.")] = 8,
    first: FirstStage = None,
    last: LastStage = None,
    as_json: Json = False,
) -> None:
    """Find the layouts of a model on a cluster, best first, by predicted step time.

    Searched: sizes, GPUs of their own, colocated and time-shared, tokens per
    micro-batch, recomputation (experts only, full), and optimizer offload. The
    exit code is 1 if no layout fits. Times are estimates from data sheets and
    a few measurements.

    \b
    Examples:
      allocation plan --model qwen3-30b-a3b -c 4x8 -b 256x8 --response 8192
      allocation plan -m qwen3-0.6b -c 1x8 -b 128x8 --staleness 0 --gpu h200 --json
    """
    from allocation.planner.search import plan_layouts
    from allocation.planner.task import Task
    from allocation.views.facts import MOST_RANKS

    if cluster.n_gpus > MOST_RANKS:
        raise typer.BadParameter(f"{cluster} has {cluster.n_gpus:,} GPUs; the planner supports at most {MOST_RANKS:,}")
    with usage(ModelError, "--model"):
        shape = load_model(model)
    _check_length(shape, prompt + response)
    _report_model(shape)
    spec = replace(batch or BatchSpec(256, 8), max_tokens_per_mb=tokens)
    task = Task(shape, cluster, gpu or GPUS["h100"], spec, prompt, response, staleness, ends=(first, last))
    if not (choices := plan_layouts(task, top)):
        from allocation.views import planned

        typer.echo(planned.no_layout(task), err=True)
        raise typer.Exit(INVALID)
    _show_layouts(task, choices, as_json)


def _show_layouts(task: Task, choices: Sequence[Choice], as_json: bool) -> None:
    """Print the layouts, the reasons for the first one, and the alternatives."""
    from allocation.planner.asynchrony import asynchrony
    from allocation.planner.search import best_each, best_on
    from allocation.views import planned

    best, tide, more = choices[0], asynchrony(task, choices[0]), best_on(task, task.cluster.n_nodes + 1)
    synchronous, asynchronous = best_each(task)
    other = synchronous if best.staleness else asynchronous
    if as_json:
        said = {"task": planned.title(task), "limits": planned.limits(task)}
        said["reasons"] = planned.reasons(task, best, tide, more, other)
        typer.echo(json.dumps({**said, "layouts": [one.to_json(task) for one in choices]}, indent=1))
    else:
        open_console().print(planned.terminal(task, choices, tide, more, other), crop=False)


def _check_length(shape: ModelSpec, longest: int) -> None:
    """Reject sequences that are longer than the model's positions."""
    if 0 < shape.max_positions < longest:
        problem = (
            f"prompt and response have {longest:,} tokens together; {shape.name} has {shape.max_positions:,} positions"
        )
        raise typer.BadParameter(problem, param_hint="--response")


def _report_model(shape: ModelSpec) -> None:
    """Print warnings about uncertain parameter counts of a model."""
    report(run_rules(Source(shape.name), whole_model=shape))


def _report_overflow(plan: Plan, cluster: Cluster | None, work: Workload) -> None:
    checked = allocation.check(
        plan.allocation, cluster=cluster, model=work.model, batch=work.batch, megatron=work.megatron, memory=work.memory
    )
    report([finding for finding in checked.findings if "MEMORY" in finding.code])


def _recompute(kind: Recompute) -> dict[str, Any]:
    full = {"recompute_method": "uniform", "recompute_num_layers": 1} if kind is Recompute.full else {}
    if kind is Recompute.experts:
        return {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
    return {} if kind is Recompute.none else {"recompute_granularity": kind.value, **full}
