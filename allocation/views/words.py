"""Numbers in words, the same in every view."""

from collections.abc import Sequence

from allocation.backends import SERVER
from allocation.gpus import merge
from allocation.language.spelling import gpu_ranges
from allocation.plan import EnginePlan, Plan


def count(number: int, noun: str) -> str:
    """Return `1 GPU`, `2 GPUs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ranges(ranks: Sequence[int]) -> str:
    """Return ranks with runs written short: `0-3 8 9`."""
    runs = merge(range(rank, rank + 1) for rank in ranks)
    return " ".join(" ".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs)


def gpu_ids(engine: EnginePlan) -> str:
    """Return the ids as the language writes them: `0-7,16-23`."""
    return ",".join(map(str, gpu_ranges(engine.gpus)))


def plan_words(plan: Plan) -> str:
    """Return the number of GPUs, the cluster, and the roles that share GPUs."""
    nodes = count(plan.cluster.n_nodes, "node")
    words = f"{count(plan.n_gpus, 'GPU')} of {nodes} with {plan.cluster.n_gpus_per_node} GPUs each."
    shared = [f" {' and '.join(group)} share GPUs." for group in plan.groups if len(group) > 1]
    return words + "".join(shared)


def engine_words(engine: EnginePlan) -> str:
    """Return a summary of an engine and its location."""
    if engine.kind == SERVER:
        each = engine.sizes.tp * engine.sizes.pp
        what = f"{count(engine.sizes.dp, f'{engine.backend} server')} of {count(each, 'GPU')}"
    else:
        what = f"{engine.backend} trainer with {count(engine.world_size, 'rank')}"
    return f"{engine.role}: {what}, GPU ids {gpu_ids(engine)}"
