"""The planner's result for a terminal: a list of layouts, the keys of the first, and the reasons for the order.

A layout has a line of its own, so that it is neither wrapped nor cut.
"""

import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from allocation.families import TRAINED
from allocation.hardware import GIB
from allocation.pipeline import EVEN, split_words
from allocation.planner.asynchrony import Asynchrony
from allocation.planner.choice import Choice
from allocation.planner.search import best_servers, fewest_nodes
from allocation.planner.seconds import offloaded_bytes
from allocation.planner.shortfall import shortfall
from allocation.planner.task import SHARE, Task
from allocation.rules.memory import TIGHT
from allocation.views.words import count

_PARTS = {
    "compute": "arithmetic", "bubble": "pipeline bubble", "tp": "tensor parallel", "cp": "context parallel",
    "ep": "expert parallel", "pp": "between stages", "dp": "gradients and weights", "optimizer": "optimizer",
    "host": "launching kernels", "offload": "moving state to host memory and back",
}  # fmt: skip
_COLUMNS = ("", "s a step", "training", "rollout", "GiB", "share", "tokens", "recompute", "GPUs", "staleness")
_WIDTHS = (3, 8, 8, 8, 4, 5, 6, 9, 11, 9)


def title(task: Task) -> str:
    """Return the planner's task in one line."""
    batch = f"{count(task.batch.n_prompts, 'prompt')} of {count(task.batch.n_samples, 'sample')}"
    kind = f"staleness up to {task.staleness}" if task.staleness else "synchronous"
    where = f"{count(task.cluster.n_gpus, 'GPU')} ({task.cluster}, {task.gpu.name})"
    return f"{task.model.name} on {where}: {batch}, up to {task.response:,} response tokens, {kind}"


def terminal(
    task: Task, choices: Sequence[Choice], tide: Asynchrony, more: Choice | None, other: Choice | None
) -> Group:
    """Return the obstacles of a plan, the layouts, best first, the keys of the best, and sentences about it."""
    lines = [Text(line, "bold yellow") for line in limits(task)]
    runs = not lines
    lines += [Text(title(task), "bold"), _whole(_row(_COLUMNS), "dim")]
    for number, one in enumerate(choices, 1):
        lines += [_whole(_row(_cells(number, one))), _whole(f"     {one.allocation}")]
    if runs:
        lines += [Text(), Text("Keys of layout 1, for the command of a run:", "bold")]
        lines += [_whole(f"  {line}") for line in command(choices[0].keys(task))]
    return Group(*lines, Text(), *map(Text, reasons(task, choices[0], tide, more, other)))


def _whole(line: str, style: str = "") -> Text:
    """Return a line that is not wrapped."""
    return Text(line, style, no_wrap=True, overflow="ignore")


def _row(cells: Sequence[str]) -> str:
    padded = (cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    return " ".join(padded).rstrip()


def _cells(number: int, one: Choice) -> list[str]:
    seconds = (one.seconds, one.trainer.seconds, one.servers.seconds)
    how = {"alternate": "time-shared", "resident": "colocated", None: "separate"}[one.sharing]
    sizes = (f"{one.peak / GIB:.0f}", f"{one.servers.share:g}", str(one.trainer.tokens))
    return [f"{number}.", *(f"{s:.1f}" for s in seconds), *sizes, one.trainer.recomputed, how, str(one.staleness)]


def command(keys: dict[str, Any]) -> list[str]:
    """Return `key=value` arguments as lines of a shell's command."""
    words = [shlex.quote(f"{key}={spell(value)}") for key, value in keys.items()]
    return [*(f"{word} \\" for word in words[:-1]), words[-1]]


def spell(value: Any) -> str:
    """Return a value of a key as YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(spell, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def stage_words(task: Task, one: Choice) -> str:
    """Return the layers of each pipeline stage where they are not equally many."""
    trainer = one.trainer
    return split_words(task.model.layers, trainer.sizes.pp, trainer.ends) if trainer.ends != EVEN else ""


def limits(task: Task) -> list[str]:
    """Return the obstacles that every layout of the model has here."""
    lines = []
    if task.model.family not in TRAINED["megatron"]:
        lines.append(f"areal-like does not train {task.model.family} with megatron: these plans cannot be run.")
    if best_servers(task, per_node := task.cluster.n_gpus_per_node, SHARE) is None:
        lines.append(
            f"No layout of {task.model.name} can be run on nodes of {count(per_node, 'GPU')} ({task.gpu.name}): a "
            "server starts on one node and has bfloat16 weights, which do not fit there."
        )
    return lines


def reasons(task: Task, best: Choice, tide: Asynchrony, more: Choice | None, other: Choice | None) -> list[str]:
    """Return the reasons for the best layout, the gain from one more node, and whether asynchrony pays.

    `other` is the best asynchronous layout if `best` is synchronous, and the best synchronous one if it is not.
    """
    parts = sorted(best.trainer.parts.items(), key=lambda part: -part[1])
    shown = ", ".join(f"{_PARTS[name]} {s:.1f}" for name, s in parts if s >= 0.01 * best.trainer.seconds)
    servers = best.servers
    lines = [
        f"Slower side: {best.bottleneck}. Training takes {best.trainer.seconds:.1f} s: {shown}.",
        f"Each of {count(servers.dp, 'server')} decodes {servers.concurrency:,} responses at once with its share of a GPU, "
        f"sglang.mem_fraction_static={servers.share:g}; the longest response alone takes {servers.longest:.1f} s. "
        f"A weight update takes {best.update:.1f} s.",
        *_memory_words(task, best),
    ]
    if words := stage_words(task, best):
        lines.append(f"The stages of its pipeline have {words} layers.")
    if more is not None and more.seconds < best.seconds:
        change = more.seconds / best.seconds - 1
        lines.append(f"With one more node {more.allocation} takes {more.seconds:.1f} s ({change:+.0%}).")
    lines.append(
        f"An even split of {tide.gpus} GPUs would have {tide.server_gpus:.1f} for servers; "
        f"expected staleness {tide.staleness:.1f}."
    )
    return [*lines, asynchrony_words(best, other)]


def _memory_words(task: Task, best: Choice) -> list[str]:
    """Return warnings about a nearly full GPU, and the host memory of offloaded state."""
    lines = []
    if best.peak > TIGHT * task.gpu.memory:
        lines.append(
            f"Memory is tight: {best.peak / GIB:.1f} of {task.gpu.memory / GIB:.1f} GiB, and the memory model has errors."
        )
    weights, optimizer = offloaded_bytes(task, best.trainer.sizes, best.trainer.megatron)
    turns = best.sharing == "alternate"
    moved = weights * turns + optimizer * (turns or best.trainer.megatron.optimizer_offload)
    if moved:
        ranks = min(task.cluster.n_gpus_per_node, best.trainer.sizes.dp * best.trainer.sizes.per_replica)
        lines.append(f"Offloaded state takes {moved * ranks / GIB:.0f} GiB of each node's host memory.")
    return lines


def asynchrony_words(best: Choice, other: Choice | None) -> str:
    """Return one sentence on whether the best asynchronous layout is quicker than the best synchronous one."""
    kinds = {True: "asynchronous training (max_head_offpolicyness of 1 or more)", False: "synchronous training"}
    pays = "pays" if best.staleness else "does not pay"
    if other is None:
        return f"Asynchrony {pays}: no layout with {kinds[best.staleness == 0]} fits."
    return (
        f"Asynchrony {pays}: layout 1 takes {best.seconds:.1f} s a step, and the best with {kinds[other.staleness > 0]} "
        f"takes {other.seconds:.1f} s, {other.allocation}."
    )


def no_layout(task: Task) -> str:
    """Return that no layout fits, why, and the size of a cluster on which one does."""
    lines = [*(line.rstrip(".") for line in limits(task))]
    lines += [f"no layout of {task.model.name} fits on {task.cluster} with {task.gpu.name}", *shortfall(task)]
    if nodes := fewest_nodes(task):
        lines.append(f"{nodes}x{task.cluster.n_gpus_per_node} is large enough")
    return "; ".join(lines)
