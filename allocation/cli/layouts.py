"""Commands about layouts: check, explain, count and groups."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated

import typer

from allocation import EnginePlan, MemorySettings, ModelError, load_model
from allocation.cases import Case, UsageError, cases
from allocation.cli.arguments import (
    Batch,
    ClusterSize,
    FirstStage,
    GpuName,
    Json,
    LastStage,
    Model,
    Order,
    Picture,
    Words,
    usage,
    with_options,
)
from allocation.cli.output import INVALID, drawable, ends, open_console, single, valid_plan, write_picture


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
        megatron = ends(first, last) if first or last else None
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


def explain(
    words: Words,
    cluster: ClusterSize = None,
    by: Annotated[str | None, typer.Option(help="Group to colour by: dp-cp, ep, pp, …")] = None,
    svg: Picture = None,
    order: Order = None,
) -> None:
    """Show the role and groups of each GPU in tables and pictures.

    \b
    Examples:
      allocation explain 'megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)'
      allocation explain sglang:d2t2+megatron:d2t2 --cluster 1x8 --by dp-cp
      allocation explain megatron:d16t8 --svg plan.svg
    """
    plan = drawable(single(words, cluster=cluster, order=order))
    from allocation.views import svg as drawn
    from allocation.views import terminal

    console = open_console()
    with usage(KeyError, "--by"):
        shown = terminal.explain(plan, by, console.width)
    if svg:
        write_picture(svg, drawn.plan_svg(plan, by))
    console.print(shown)


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
        typer.echo(valid_plan(case).n_gpus)


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

    engines = drawable(single(words, cluster=cluster, order=order)).engines
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
        open_console().print(groups_list(engine, name) if rank is None else partners(engine, rank, name))


def _some(engines: Iterable[EnginePlan], problem: str, option: str) -> tuple[EnginePlan, ...]:
    if not (found := tuple(engines)):
        raise typer.BadParameter(problem, param_hint=option)
    return found


def _print_case(case: Case) -> None:
    from allocation.views.terminal import finding_text, verdict

    checked_with = [f"  checked with {case.checked_with}"] if case.checked_with else []
    for line in (verdict(case.label, case.plan), *checked_with, *map(finding_text, map(with_options, case.findings))):
        open_console().print(line, soft_wrap=True)
