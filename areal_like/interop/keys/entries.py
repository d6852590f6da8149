"""Entries of the tables: our equivalent of another system's key, and entries that several tables share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allocation.convert import megatron


@dataclass(frozen=True, slots=True)
class Entry:
    """One meaning of a key: our key, or why none is needed, or why training changes.

    `values` maps the values of the key to ours, None to leave it out; `below` appends the rest of a longer key. With
    `same`, the key changes nothing if it has one of these values. `together` names our keys that follow from this key
    and others.
    """

    ours: str | None = None
    unneeded: str | None = None
    changes: str | None = None
    together: str | None = None
    values: Mapping[str, Any] | None = None
    same: tuple[Any, ...] = ()
    below: bool = False

    def __hash__(self) -> int:
        return hash((self.ours, self.unneeded, self.changes, self.together))


Table = dict[str, Entry]


def rename(key: str, values: Mapping[str, Any] | None = None, *, below: bool = False) -> Entry:
    """Return the entry of a key that has another name here."""
    return Entry(ours=key, values=values, below=below)


def drop(why: str) -> Entry:
    """Return the entry of a key that is unnecessary here and does not change training."""
    return Entry(unneeded=why)


def changes(why: str, *same: Any) -> Entry:
    """Return the entry of a key without an equivalent, which has no effect if its value is in `same`."""
    return Entry(changes=why, same=(None, *same))


def together(key: str) -> Entry:
    """Return the entry of a key that sets our `key` together with others (`areal_like.interop.keys.rules`)."""
    return Entry(together=key)


def prune(table: Table) -> Table:
    """Return the table without entries that repeat the entry of the nearest section."""

    def nearest(key: str) -> Entry | None:
        sections = (key[:place] for place in range(len(key) - 1, 0, -1) if key[place] == ".")
        return next((table[section] for section in sections if section in table), None)

    return {key: entry for key, entry in table.items() if nearest(key) != entry}


LAYOUT = drop("the layout defines it (allocation_mode, or actor.backend and rollout.backend)")
DDP = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
PACKED = "micro-batches are packed up to mb_spec.max_tokens_per_mb; their size does not change the gradient"
REPORT = drop("console, TensorBoard and a report are written (stats_logger)")
HELD_OUT = drop("set evaluation prompts in valid_dataset, or several sets in evaluator.datasets")
IMAGES = "images, audio and video are not supported: prompts are text"
NO_ALGORITHM = "this algorithm is not built in: write a function and set algorithm=my_file.py:make (docs/algorithms.md)"
PATTERN = "samples are drawn from the full distribution, which SGLang's log-probs describe"
NEVER = {"-1": None, "0": None}
MODEL = drop("the model's config.json defines it")
SPEED = drop("it changes speed or memory, not training")
LORA_MODULES = {  # Megatron's linear layers
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}
ESTIMATORS = {"kl": "k1", "low_var_kl": "k3", "mse": "k2", "kl+": "k1", "low_var_kl+": "k3", "k3+": "k3"}
SCHEDULES = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}

TRANSFORMER = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_layer_recompute"),
)
MEGATRON: Table = {
    **dict.fromkeys(megatron.MEGATRON.values(), LAYOUT),
    "sequence_parallel": drop("sequence parallelism is on whenever tensor parallelism is"),
}
