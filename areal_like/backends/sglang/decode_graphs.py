"""The batch sizes for which a GPU server captures CUDA graphs of decoding passes.

Without a graph the host launches a pass kernel by kernel, which takes 20 to 50 ms for 30 layers, with any batch.
With one, a pass of a small model takes 2 to 15 ms. A batch between two sizes runs in the graph of the larger one.
"""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from areal_like.core.config.schema import RunConfig

EVALUATED = 256  # sequences that a server is taken to have at once when all evaluation prompts are generated
MOST_SEQUENCES = 1536  # of more, the work on the GPU hides how slowly a host launches it
LOGITS = 512 << 20  # most bytes of a graph's float32 logits
_OPTIONS = ("cuda_graph_max_bs_decode", "cuda_graph_bs_decode", "cuda_graph_max_bs", "cuda_graph_bs")


def graph_options(config: RunConfig, servers: int, model: Mapping[str, Any]) -> dict[str, object]:
    """Return SGLang's option for the sizes, {} where the user has set one; `model` is the model's config.json."""
    if any(name.replace("-", "_") in _OPTIONS for name in config.sglang.extra_args):
        return {}
    vocabulary = (model.get("text_config") or model).get("vocab_size") or 1
    return {"cuda-graph-bs-decode": graph_sizes(_most(config, servers, vocabulary)[0])}


def most_captured(config: RunConfig, servers: int, vocabulary: int) -> tuple[int | None, str]:
    """Return the most sequences that graphs of a server hold, and the reason in words.

    0 without graphs, None with sizes that the user set.
    """
    options = {name.replace("-", "_"): value for name, value in config.sglang.extra_args.items()}
    for name in ("disable_cuda_graph", "disable_decode_cuda_graph"):
        if options.get(name):
            return 0, f"sglang.extra_args.{name}"
    own = next((name for name in _OPTIONS if name in options), None)
    return (None, f"sglang.extra_args.{own}") if own else _most(config, servers, vocabulary or 1)


def _most(config: RunConfig, servers: int, vocabulary: int) -> tuple[int, str]:
    rows = LOGITS // (4 * vocabulary), f"logits of more exceed {LOGITS >> 20} MiB"
    return min(most_at_once(config, servers), rows, key=itemgetter(0))


def most_at_once(config: RunConfig, servers: int) -> tuple[int, str]:
    """Return the most sequences that one of the `servers` runs at the staleness bound, and the reason in words.

    A batch that is never run is not captured either, which saves a part of the server's start.
    """
    rollout, sglang, samples = config.rollout, config.sglang, config.gconfig.n_samples
    groups = config.prompts_per_step * (1 + rollout.max_head_offpolicyness + rollout.oversampling)
    most = math.ceil(groups * samples / servers), f"{groups:g} groups of {samples} at once, on {servers} in all"
    if config.evaluations:
        most = max(most, (EVALUATED, "an evaluation may bring as many"), key=itemgetter(0))
    limits = (
        (rollout.max_concurrent_rollouts, "rollout.max_concurrent_rollouts"),
        (sglang.max_running_requests, "sglang.max_running_requests"),
        (MOST_SEQUENCES, f"of up to {most[0]:,} at once; larger passes need no graph"),
    )
    return min([most, *((limit, why) for limit, why in limits if limit)], key=itemgetter(0))


def graph_sizes(most: int) -> Sequence[int]:
    """Return sizes up to `most`, each at most a quarter larger than the one before.

    SGLang's own list has a size for every 8 to 32 sequences: three times as many, each half a second of a start.
    """
    sizes = [1, 2, 4, 8, 12, 16]
    while sizes[-1] < most:
        step = 8 if sizes[-1] < 64 else 2 ** int(math.log2(sizes[-1])) // 4
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < most] + [max(most, 1)]
