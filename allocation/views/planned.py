"""The planner's result for a terminal: a table of layouts, and the reasons for the order."""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from allocation.families import TRAINED
from allocation.hardware import GIB
from allocation.pipeline import EVEN, split_words
from allocation.planner import Asynchrony, Choice, Task
from allocation.views.terminal import plain_table
from allocation.views.words import count

_PARTS = {
    "compute": "arithmetic", "bubble": "pipeline bubble", "tp": "tensor parallel", "cp": "context parallel",
    "ep": "expert parallel", "pp": "between stages", "dp": "gradients and weights", "optimizer": "optimizer",
    "host": "launching kernels",
}  # fmt: skip


def title(task: Task) -> str:
    """Return the planner's task in one line."""
    batch = f"{count(task.batch.n_prompts, 'prompt')} of {count(task.batch.n_samples, 'sample')}"
    kind = f"staleness up to {task.staleness}" if task.staleness else "synchronous"
    where = f"{count(task.cluster.n_gpus, 'GPU')} ({task.cluster}, {task.gpu.name})"
    return f"{task.model.name} on {where}: {batch}, up to {task.response:,} response tokens, {kind}"


def terminal(task: Task, choices: Sequence[Choice], tide: Asynchrony, more: Choice | None) -> Group:
    """Return the layouts, best first, and sentences about the best."""
    numbers = ("s a step", "training", "rollout", "GiB", "share")
    uneven = any(one.trainer.ends != EVEN for one in choices)
    stages = ["layers of stages"] if uneven else []
    table = plain_table(*numbers, "recompute", *stages, "allocation", right=numbers)
    for one in choices:
        seconds = (one.seconds, one.trainer.seconds, one.servers.seconds)
        recompute = one.trainer.megatron.recompute_granularity or ""
        memory = (f"{one.peak / GIB:.0f}", f"{one.servers.share:g}")
        table.add_row(
            *(f"{s:.1f}" for s in seconds), *memory, recompute, *[stage_words(task, one)] * uneven, one.allocation
        )
    return Group(Text(title(task), "bold"), table, Text(), *map(Text, reasons(task, choices[0], tide, more)))


def stage_words(task: Task, one: Choice) -> str:
    """Return the layers of each pipeline stage where they are not equally many."""
    trainer = one.trainer
    return split_words(task.model.layers, trainer.sizes.pp, trainer.ends) if trainer.ends != EVEN else ""


def reasons(task: Task, best: Choice, tide: Asynchrony, more: Choice | None) -> list[str]:
    """Return the reasons for the best layout, the gain from one more node, and whether asynchrony pays."""
    parts = sorted(best.trainer.parts.items(), key=lambda part: -part[1])
    shown = ", ".join(f"{_PARTS[name]} {s:.1f}" for name, s in parts if s >= 0.01 * best.trainer.seconds)
    servers = best.servers
    lines = [
        f"Slower side: {best.bottleneck}. Training takes {best.trainer.seconds:.1f} s: {shown}.",
        f"Each of {count(servers.dp, 'server')} decodes {servers.concurrency:,} responses at once with its share of a GPU, "
        f"sglang.mem_fraction_static={servers.share:g}; the longest response alone takes {servers.longest:.1f} s. "
        f"A weight update takes {best.update:.1f} s.",
    ]
    named = zip(("first", "last"), best.trainer.ends, strict=True)
    if keys := " and ".join(f"num_layers_in_{which}_pipeline_stage={n}" for which, n in named if n is not None):
        lines.append(f"The stages of its pipeline have {stage_words(task, best)} layers: set {keys}.")
    if task.model.family not in TRAINED["megatron"]:
        lines.append(f"areal-like does not train {task.model.family} with megatron: this plan cannot be run.")
    if servers.tp > task.cluster.n_gpus_per_node:
        nodes = servers.tp // task.cluster.n_gpus_per_node
        lines.append(f"A server needs {nodes} nodes, but areal-like starts each server on one node.")
    if more is not None and more.seconds < best.seconds:
        change = more.seconds / best.seconds - 1
        lines.append(f"With one more node {more.allocation} takes {more.seconds:.1f} s ({change:+.0%}).")
    lines.append(
        f"Of {tide.gpus} GPUs, {tide.server_gpus:.1f} for servers would balance both sides at {tide.even:.1f} s; "
        f"expected staleness {tide.staleness:.1f}."
    )
    return [*lines, asynchrony_words(best, tide)]


def asynchrony_words(best: Choice, tide: Asynchrony) -> str:
    """Return one sentence on whether hiding the longest response is worth the uneven split."""
    synchronous, split = tide.even + tide.tail, max(best.trainer.seconds, best.servers.seconds)
    if best.shared or split >= synchronous:
        return (
            f"Asynchrony does not pay: synchronous training on all GPUs would take {synchronous:.1f} s plus the update, of "
            f"which the longest response is {tide.tail:.1f} s."
        )
    return (
        f"Asynchrony pays: synchronous training on all GPUs would take {synchronous:.1f} s plus the update, {tide.tail:.1f} s "
        f"of it waiting for the longest response; asynchronous training takes {split:.1f} s."
    )
