"""Measure how evenly packing spreads the cost of long-tailed lengths, by tokens and by FLOPs.

    python -m benchmarks.packing [--ranks 8] [--seed 1]

A batch has log-normal lengths, cut off at 32,768 tokens. Costs are multiplications of a forward pass without the output
layer (`allocation.parameters.sequence_products`). `ranks` is the largest rank's cost over the mean: the time of ranks
that wait for each other once in a step. `micro_batches` is the sum over micro-batches of the largest rank's cost, over
the mean of ranks: the time of ranks that wait in each micro-batch, for parameters (FSDP) or experts. 1 is the optimum.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import typer

from allocation import load_model
from allocation.model_spec import ModelSpec
from allocation.parameters import sequence_products
from areal_like.trainer.packing import make_schedule
from benchmarks.report import save

MODELS, LONGEST = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"), 32768
BATCHES = ((512, 32768), (512, 65536), (2048, 32768), (2048, 65536))  # sequences, tokens of a micro-batch


def main(ranks: int = 8, seed: int = 1) -> None:
    cases = [case(name, sequences, tokens, ranks, seed) for name in MODELS for sequences, tokens in BATCHES]
    for each in cases:
        print(each)
    save("packing_cpu", {"unit": "times the mean", "ranks": ranks, "seed": seed, "cases": cases})


def case(name: str, sequences: int, tokens: int, ranks: int, seed: int) -> dict[str, Any]:
    """Return the spread of a batch balanced by tokens, and by cost for both kinds of ranks."""
    model = load_model(name)
    lengths = np.minimum(np.random.default_rng(seed).lognormal(6.5, 1.3, sequences).astype(int) + 1, LONGEST)
    by_rule = {
        "tokens": spread(model, lengths, tokens, ranks, model=None),
        "cost": spread(model, lengths, tokens, ranks, model=model, meet=False),
        "cost, ranks meet": spread(model, lengths, tokens, ranks, model=model, meet=True),
    }
    return {"model": name, "sequences": sequences, "tokens_per_micro_batch": tokens, **by_rule}


def spread(shape: ModelSpec, lengths: np.ndarray, tokens: int, ranks: int, **rule: Any) -> dict[str, float]:
    """Return the spread of one rule's schedule, and the milliseconds to compute it."""
    start = time.process_time()
    schedule = make_schedule(lengths, dp=ranks, max_tokens=tokens, alignment=1, **rule)
    seconds = time.process_time() - start
    costs = np.array(
        [[sum(sequence_products(shape, int(lengths[i])) for i in part) for part in rank] for rank in schedule]
    )
    mean = costs.sum() / ranks
    return {
        "ranks": round(float(costs.sum(axis=1).max() / mean), 4),
        "micro_batches": round(float(costs.max(axis=0).sum() / mean), 4),
        "count": costs.shape[1],
        "milliseconds": round(1000 * seconds, 1),
    }


if __name__ == "__main__":
    typer.run(main)
