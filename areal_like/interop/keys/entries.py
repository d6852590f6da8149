"""What a key of another system is here, and what several of the tables share."""

from dataclasses import dataclass

from allocation.convert import megatron


@dataclass(frozen=True, slots=True)
class Entry:
    """Exactly one of them is set: the key here, why the key is not needed, or why its meaning is not offered."""

    ours: str | None = None
    unneeded: str | None = None
    lost: str | None = None


Table = dict[str, Entry]


def to(key: str) -> Entry:
    """The key here."""
    return Entry(ours=key)


def unneeded(why: str) -> Entry:
    """A key that nothing here needs."""
    return Entry(unneeded=why)


def lost(why: str) -> Entry:
    """A key whose meaning is not offered."""
    return Entry(lost=why)


LAYOUT = unneeded("the layout says it (allocation_mode, or actor.backend and rollout.backend)")
DDP = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
NOWHERE = "it has no counterpart that a run needs"
PACKED = "micro-batches are packed up to mb_spec.max_tokens_per_mb"
REPORT = unneeded("console, TensorBoard and a report are written (stats_logger)")
HELD_OUT = "name held-out prompts in valid_dataset, or several sets in evaluator.datasets"
CHECKED = "write a sequence classifier as reward.model.path and .backend, with reward.type=model"

TRANSFORMER = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_layer_recompute"),
)
MEGATRON: Table = {
    **dict.fromkeys(megatron.MEGATRON.values(), LAYOUT),
    "sequence_parallel": unneeded("it is on whenever tensor parallelism is"),
}
